"""Families that cut large images into tiles, and add the whole image as an overview: Idefics3, LFM2-VL and InternVL.

The sizes are those of the models' processors in Hugging Face transformers, with the same arithmetic in float64.
libmtmd, the vision library of llama.cpp, makes other tiles for some images:

family    libmtmd                                                   the model's processor, and llmrun
--------  --------------------------------------------------------  ------------------------------------------------
Idefics3  always adds an overview                                   no overview if there is only one tile
Idefics3  fails if the narrow side becomes 0 pixels                 the narrow side has at least 1 pixel
LFM2      rounds halves away from zero, in float32                  rounds halves to even
LFM2      compares ratios of sides in float32                       compares in float64
InternVL  tiles that keep the most pixels; at most one tile below   the grid with the closest ratio of sides
          the size of a tile
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from llmrun.base.errors import UsageError
from llmrun.formats.images.header import LONGEST_SIDE
from llmrun.formats.images.scaling import Filter, Scaled
from llmrun.model.vision.family import (
    LOW,
    SCALE_FACTOR,
    Family,
    Limits,
    Sizes,
    cut,
    fault_of_square,
    joined,
    stretched,
    whole_image,
)
from llmrun.model.vision.layout import ImageLayout, Rows
from llmrun.model.vision.whole import aligned_size, most_aligned

if TYPE_CHECKING:
    from collections.abc import Iterator


class Idefics3(Family):
    """Idefics3, SmolVLM and Granite Docling. The longer side of an image is scaled to a fixed length."""

    names = ("idefics3",)
    placeholders = ("<image>",)
    merge_key, usual_merge = SCALE_FACTOR, 1
    markers = ("<fake_token_around_image>", "<global-img>", "<row_1_col_1>")

    _USUAL_EDGE, _MOST_TILES = 4, 16  # tiles of the longer side: for files that do not specify it, and the maximum
    _MOST_EDGE = 4096  # pixels

    def __init__(self, sizes: Sizes, limits: Limits) -> None:
        super().__init__(sizes, limits)
        limits.check_reachable(self.most_rows)

    @classmethod
    def fault(cls, sizes: Sizes) -> str:
        if sizes.longest_edge > cls._MOST_TILES * sizes.image_size:
            return f"a longest edge of {sizes.longest_edge} pixels needs too many tiles of {sizes.image_size}"
        return fault_of_square(sizes)

    @property
    def most_rows(self) -> int:
        return self.sizes.side**2

    def layout(self, width: int, height: int, detail: str) -> ImageLayout:
        """Return the layout with the longest edge that the limits allow, or with the shortest one for low detail."""
        allowed = [
            layout for layout in self._layouts(width, height) if layout.rows <= (self.limits.most or layout.rows)
        ]
        if detail != LOW:
            return allowed[0]
        return next((one for one in reversed(allowed) if one.rows >= (self.limits.least or 1)), allowed[0])

    def _layouts(self, width: int, height: int) -> Iterator[ImageLayout]:
        """Yield the layouts from the largest to the smallest, which is a single tile."""
        tile = self.sizes.image_size
        longest = self.sizes.longest_edge or self._USUAL_EDGE * tile
        for edge in (longest, *range((longest - 1) // tile * tile, 0, -tile)):
            yield self._layout(width, height, edge)

    def _layout(self, width: int, height: int, edge: int) -> ImageLayout:
        tile, side = self.sizes.image_size, self.sizes.side
        count = side**2
        first = _scaled_to_edge(width, height, edge, self._MOST_EDGE)
        columns, rows = _tiles_for(*first, tile)
        around, overview = "<fake_token_around_image>", "<fake_token_around_image><global-img>"
        whole = Scaled(*first, Filter.LANCZOS, ())
        if columns == rows == 1:
            parts: list[str | Rows] = [overview, Rows(0, count, side, side), around]
            return ImageLayout(joined(parts), (whole, stretched(tile, tile, Filter.LANCZOS, source=0)), tile, tile)
        parts = []
        for row in range(rows):
            for column in range(columns):
                number = row * columns + column
                parts += [f"{around}<row_{row + 1}_col_{column + 1}>", Rows(number, count, side, side)]
            parts.append("\n")
        parts += ["\n", overview, Rows(columns * rows, count, side, side), around]
        tiles = cut(columns, rows, tile, Filter.LANCZOS, source=0)
        scaled = (whole, tiles, stretched(tile, tile, Filter.LANCZOS, source=1))
        return ImageLayout(joined(parts), scaled, tiles.width, tiles.height)


def _scaled_to_edge(width: int, height: int, edge: int, most: int) -> tuple[int, int]:
    """Return the size whose longer side is `edge`, but not more than `most`. The shorter side is even if possible."""
    ratio = width / height
    if width >= height:
        longer, shorter = edge, int(edge / ratio)
    else:
        longer, shorter = edge, int(edge * ratio)
    shorter = max(1, shorter + shorter % 2)
    size = (longer, shorter) if width >= height else (shorter, longer)
    if edge <= most:
        return size
    ratio = size[0] / size[1]
    return (most, max(1, int(most / ratio))) if size[0] >= size[1] else (max(1, int(most * ratio)), most)


def _tiles_for(width: int, height: int, tile: int) -> tuple[int, int]:
    """Return how many columns and rows of tiles an image needs."""
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / tile)
        return columns, math.ceil(int(columns * tile / ratio) / tile)
    rows = math.ceil(height / tile)
    return math.ceil(int(rows * tile * ratio) / tile), rows


class Lfm2VL(Family):
    names = ("lfm2",)
    placeholders = ("<image>",)
    merge_key, usual_merge = SCALE_FACTOR, 1
    markers = ("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", "<|img_row_1_col_1|>")

    TILE = 512
    LEAST, MOST = 64, 256  # tokens of an image that is not cut
    _LEAST_TILES, _MOST_TILES = 2, 10
    _TOLERANCE = 2  # images up to this many times MOST are reduced instead of cut

    def __init__(self, sizes: Sizes, limits: Limits) -> None:
        super().__init__(sizes, limits)
        self._of_tile = (self.TILE // sizes.unit) ** 2
        least, most = limits.least or self.LEAST, limits.most
        self._most = max(self.MOST, least) if most is None else min(max(self.MOST, least), most)
        self._least = min(least, self._most)
        tiles = self._MOST_TILES if most is None else min(self._MOST_TILES, most // self._of_tile - 1)
        self._tiles = tiles if tiles >= self._LEAST_TILES else 0

    @classmethod
    def fault(cls, sizes: Sizes) -> str:
        return f"tiles of {cls.TILE} pixels cannot be divided into rows" if cls.TILE % sizes.unit else ""

    @property
    def most_rows(self) -> int:
        return max(self._of_tile, most_aligned(self._least, self._most, LONGEST_SIDE))

    def layout(self, width: int, height: int, detail: str) -> ImageLayout:
        unit = self.sizes.unit
        size = aligned_size(width, height, unit, self._least, self._most)
        if detail == LOW:
            # Narrow images may have more rows with lower limits, because their longer side is stretched.
            size = min(size, aligned_size(width, height, unit, self._least, self._least), key=math.prod)
        grid = size[0] // unit, size[1] // unit
        if detail == LOW or not self._tiles or not self._is_large(width, height):
            return whole_image(size, Filter.BILINEAR, "<|image_start|>", grid, "<|image_end|>")
        side = self.TILE // unit
        columns, rows = closest_grid(width, height, self.TILE, self._LEAST_TILES, self._tiles)
        parts: list[str | Rows] = ["<|image_start|>"]
        for number in range(columns * rows):
            row, column = divmod(number, columns)
            parts += [f"<|img_row_{row + 1}_col_{column + 1}|>", Rows(number, self._of_tile, side, side)]
        parts += ["<|img_thumbnail|>", Rows(columns * rows, grid[0] * grid[1], *grid), "<|image_end|>"]
        tiles = cut(columns, rows, self.TILE, Filter.BILINEAR)
        return ImageLayout(joined(parts), (tiles, stretched(*size, Filter.BILINEAR)), tiles.width, tiles.height)

    def _is_large(self, width: int, height: int) -> bool:
        columns, rows = (round(side / self.sizes.unit) for side in (width, height))
        return columns * rows > self._most * self._TOLERANCE


class InternVL(Family):
    names = ("internvl",)
    placeholders = ("<IMG_CONTEXT>", "<image>")
    merge_key, usual_merge = SCALE_FACTOR, 1
    markers = ("<img>", "</img>")

    _MOST_TILES = 12

    def __init__(self, sizes: Sizes, limits: Limits) -> None:
        super().__init__(sizes, limits)
        counts = range(sizes.least_tiles or 1, (sizes.most_tiles or self._MOST_TILES) + 1)
        limits.check_reachable(self._rows(counts[0]), self._rows(counts[-1]))
        least, most = limits.least or 1, limits.most or self._rows(counts[-1])
        allowed = [count for count in counts if least <= self._rows(count) <= most]
        if not allowed:
            raise UsageError(f"no image has {least:,} to {most:,} tokens with this projector")
        self._fewest, self._most = allowed[0], allowed[-1]

    @classmethod
    def fault(cls, sizes: Sizes) -> str:
        least, most = sizes.least_tiles or 1, sizes.most_tiles or cls._MOST_TILES
        return fault_of_square(sizes) or (f"{least} to {most} tiles are no range" if least > most else "")

    @property
    def most_rows(self) -> int:
        return self.sizes.side**2

    def layout(self, width: int, height: int, detail: str) -> ImageLayout:
        tile, side, most = self.sizes.image_size, self.sizes.side, self._fewest if detail == LOW else self._most
        columns, rows = closest_grid(width, height, tile, self._fewest, most)
        tiles = cut(columns, rows, tile, Filter.BICUBIC)
        overview = () if columns * rows == 1 else (stretched(tile, tile, Filter.BICUBIC),)
        numbers = range(columns * rows + len(overview))
        parts: list[str | Rows] = [Rows(number, self.most_rows, side, side) for number in numbers]
        return ImageLayout(joined(["<img>", *parts, "</img>"]), (tiles, *overview), tiles.width, tiles.height)

    def _rows(self, tiles: int) -> int:
        """Return the number of rows of an image with this many tiles and an overview."""
        return (tiles + (tiles > 1)) * self.most_rows


def closest_grid(width: int, height: int, tile: int, least: int, most: int) -> tuple[int, int]:
    """Return the columns and rows of the grid with `least` to `most` tiles whose ratio is closest to an image's.

    Among grids of the same ratio, a larger one is chosen if the image has more than half of its pixels.
    """
    grids = ((c, r) for c in range(1, most + 1) for r in range(1, most // c + 1) if c * r >= least)
    best, best_difference = (1, 1), math.inf
    for columns, rows in sorted(grids, key=lambda grid: (grid[0] * grid[1], grid[0])):
        difference = abs(width / height - columns / rows)
        if difference < best_difference or (
            difference == best_difference and width * height > 0.5 * tile * tile * columns * rows
        ):
            best, best_difference = (columns, rows), difference
    return best
