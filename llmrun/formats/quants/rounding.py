"""Functions that round weights to integer levels, shared by all types that gguf-py can write.

Inverse scales are computed from the float32 scale, before it is rounded to f16.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def inverse(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute 1 / scale in float32. Returns 0 for a scale of 0, which occurs if all weights of a block are equal."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(scale == 0, np.float32(0), np.float32(1) / scale)


def around_zero(blocks: NDArray[np.float32], middle: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Quantize blocks symmetrically: float32[n, block] -> scale float32[n, 1], levels uint8[n, block].

    Levels are 0 to 2 * middle - 1, and weight = scale * (level - middle). The weight with the largest magnitude in a
    block becomes level 0.
    """
    widest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1, keepdims=True), axis=-1)
    with np.errstate(over="ignore", invalid="ignore"):
        scale = widest / np.float32(-middle)
        levels = np.trunc(blocks * inverse(scale) + np.float32(middle + 0.5))
        return scale, levels.astype(np.uint8).clip(0, 2 * middle - 1)


def above_the_least(
    blocks: NDArray[np.float32], greatest: int
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.uint8]]:
    """Quantize blocks with a minimum: float32[n, block] -> scale and minimum float32[n, 1], levels uint8[n, block].

    weight = scale * level + minimum. The smallest weight of a block becomes level 0, the largest becomes `greatest`.
    """
    minimum, maximum = blocks.min(axis=-1, keepdims=True), blocks.max(axis=-1, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore"):
        scale = (maximum - minimum) / np.float32(greatest)
        levels = np.trunc((blocks - minimum) * inverse(scale) + np.float32(0.5))
        return scale, minimum, levels.astype(np.uint8).clip(0, greatest)


def half_away_from_zero(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round to integers, with ties away from zero like C's `roundf`."""
    magnitude = np.abs(numbers)
    whole = np.floor(magnitude)
    rounded: NDArray[np.float32] = np.sign(numbers) * (whole + np.floor(np.float32(2) * (magnitude - whole)))
    return rounded
