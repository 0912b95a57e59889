"""Builds batches of prompts with images, as the engine does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from llmrun.base.types import IMAGE_ROW, LOGITS, Batch
from llmrun.model.vision.layout import ImageLayout, Rows

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ReadsImages(Protocol):
    """The properties that decide the positions and the mask of rows, as in `Projector`."""

    @property
    def is_causal(self) -> bool: ...

    @property
    def uses_mrope(self) -> bool: ...


class Image(NamedTuple):
    """A tile in a prompt, with its rows float32[count, row width]."""

    piece: Rows
    rows: NDArray[np.float32]


def prompt_batch(
    projector: ReadsImages, parts: Sequence[Sequence[int] | Image], *, seq: int = 0, wanted: int | None = 1
) -> Batch:
    """Return the batch of a prompt that begins at position 0 and consists of tokens and images.

    wanted  how many of the last rows want logits, or None for all rows
    """
    tokens: list[int] = []
    times: list[tuple[int, int, int]] = []
    ahead: list[int] = []
    embeds: list[NDArray[np.float32]] = []
    at = 0  # the next position in time
    for part in parts:
        if not isinstance(part, Image):
            tokens += part
            times += [(at + row,) * 3 for row in range(len(part))]
            ahead += [0] * len(part)
            at += len(part)
            continue
        piece, count = part.piece, part.piece.count
        tokens += [IMAGE_ROW] * count
        if projector.uses_mrope:
            times += [(at, at + row // piece.nx, at + row % piece.nx) for row in range(count)]
            at += max(piece.nx, piece.ny)
        else:
            times += [(at + row,) * 3 for row in range(count)]
            at += count
        ahead += [0] * count if projector.is_causal else range(count - 1, -1, -1)
        embeds.append(part.rows)
    n = len(tokens)
    want = np.zeros(n, np.uint8)
    want[0 if wanted is None else n - wanted :] = LOGITS
    return Batch(
        np.array(tokens, np.int32),
        np.full(n, seq, np.int32),
        np.arange(n, dtype=np.int32),
        want,
        None,
        np.concatenate(embeds) if embeds else None,
        np.array(times, np.int32) if projector.uses_mrope else None,
        None if projector.is_causal else np.array(ahead, np.int32),
    )


def part_of(batch: Batch, start: int, end: int | None = None, *, wanted: int | None = None) -> Batch:
    """Return the rows from `start` to `end` of a prompt's batch.

    wanted  how many of the last rows want logits, or None for those of the batch
    """
    rows = slice(start, end)
    embeds = None
    if batch.embeds is not None:
        before, own = (int((batch.tokens[part] == IMAGE_ROW).sum()) for part in (slice(start), rows))
        embeds = batch.embeds[before : before + own] if own else None
    want = batch.want[rows].copy()
    if wanted is not None:
        want[:] = 0
        want[len(want) - wanted :] = LOGITS
    return Batch(
        *(batch.tokens[rows], batch.seq[rows], batch.pos[rows], want, None, embeds),
        None if batch.rope_pos is None else batch.rope_pos[rows],
        None if batch.ahead is None else batch.ahead[rows],
    )


def joined(batches: Sequence[Batch]) -> Batch:
    """Return one batch with the rows of several, which all have RoPE positions or `ahead`, or none of them."""

    def rows_of(name: str) -> Any:
        found = [getattr(batch, name) for batch in batches if getattr(batch, name) is not None]
        return np.concatenate(found) if found else None

    return Batch(**{field.name: rows_of(field.name) for field in fields(Batch)})


def picture(width: int, height: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return an asymmetric picture, uint8[height, width, 3]: gradients that differ by channel, with noise in a corner.

    Swapped axes, channels and tiles change such a picture.
    """
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([x * 255 // max(width - 1, 1), y * 255 // max(height - 1, 1), (x + 2 * y + 31 * seed) % 256], -1)
    corner = np.random.default_rng(seed).integers(0, 256, (-(-height // 3), -(-width // 2), 3))
    pixels[: len(corner), : corner.shape[1]] = corner
    return pixels.astype(np.uint8)


def tiles_of(layout: ImageLayout, seed: int = 0) -> list[NDArray[np.uint8]]:
    """Return a different picture for each tile of a layout."""
    boxes = [box for scaled in layout.scaled for box in scaled.boxes]
    return [picture(box.right - box.left, box.bottom - box.top, seed + number) for number, box in enumerate(boxes)]


def one_tile(layout: ImageLayout) -> ImageLayout:
    """Return a layout that has only the first tile of another one, without text."""
    piece = next(piece for piece in layout.pieces if isinstance(piece, Rows) and piece.tile == 0)
    return ImageLayout((piece,), layout.scaled, layout.width, layout.height)
