"""Layouts of images in the form in which they are compared with other programs, and sizes of images to compare."""

from __future__ import annotations

import random
from typing import Any

from llmrun.formats.images.scaling import Box
from llmrun.model.vision.layout import ImageLayout, Rows

LONGEST = 16384
EDGES = (
    *((1, 1), (1, 2), (2, 1), (1, 10000), (10000, 1), (1, 200), (200, 1), (1, 201), (32, 32), (28, 28), (48, 48)),
    *((448, 448), (449, 448), (512, 512), (1024, 512), (896, 896), (1024, 768), (1540, 1540), (4032, 3024)),
    (LONGEST, LONGEST),
)


def image_sizes(source: random.Random, count: int) -> list[tuple[int, int]]:
    """Return random sizes: edge cases, small, narrow and large images, ties of rounding, and exact multiples."""

    def uniform() -> tuple[int, int]:
        return source.randint(1, 2500), source.randint(1, 2500)

    def small() -> tuple[int, int]:
        return source.randint(1, 64), source.randint(1, 64)

    def narrow() -> tuple[int, int]:
        return source.randint(1, 40), source.randint(100, 10000)

    def large() -> tuple[int, int]:
        return source.randint(2000, LONGEST), source.randint(2000, LONGEST)

    def multiple() -> tuple[int, int]:
        unit = source.choice((14, 16, 24, 28, 32, 48, 56, 112, 224, 256, 448, 512))
        return unit * source.randint(1, 40), unit * source.randint(1, 40)

    def same_ratio() -> tuple[int, int]:
        scale = source.randint(1, 900)
        return scale * source.randint(1, 12), scale * source.randint(1, 12)

    kinds = (uniform, uniform, small, narrow, large, multiple, same_ratio)
    sizes = list(EDGES)
    while len(sizes) < count:
        width, height = source.choice(kinds)()
        sizes.append((width, height) if source.random() < 0.5 else (height, width))
    return sizes[:count]


def text_of(layout: ImageLayout) -> str:
    """Return the text of a layout, in which <N> stands for N rows of one or more tiles."""
    text, count = "", 0
    for piece in layout.pieces:
        if isinstance(piece, Rows):
            count += piece.count
            continue
        text += (f"<{count}>" if count else "") + piece.text
        count = 0
    return text + (f"<{count}>" if count else "")


def steps_of(layout: ImageLayout) -> list[list[Any]]:
    return [[scaled.width, scaled.height, str(scaled.filter), scaled.source] for scaled in layout.scaled]


def tiles_of(layout: ImageLayout) -> list[Box]:
    """Return the boxes of all tiles, in their order."""
    return [box for scaled in layout.scaled for box in scaled.boxes]


def tile_sizes(layout: ImageLayout) -> dict[tuple[int, int], int]:
    """Map the size of each tile to its number of rows."""
    rows = {piece.tile: piece.count for piece in layout.pieces if isinstance(piece, Rows)}
    return {(box.right - box.left, box.bottom - box.top): rows[tile] for tile, box in enumerate(tiles_of(layout))}
