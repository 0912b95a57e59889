"""Uses NumPy to convert rows of the weight types in packed_types.WIDENED_TYPES to one format with a byte per weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.formats.layouts.packed_types import WIDE_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray


def widened(kind: str, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Convert uint8[rows, row bytes in the file] to uint8[rows, 40 * columns / 32].

    Each block of the result has two scales and 32 integers. A weight is exactly the product of its integer and scale.
    """
    from llmrun.formats.quants.registry import BY_NAME

    unpack = BY_NAME[kind.upper()].unpack
    assert unpack is not None
    weights = unpack(raw)
    rows, columns = weights.values.shape
    scales, numbers = weights.super_scales, weights.sub_scales
    if numbers is not None:
        scales = np.repeat(scales, numbers.shape[1] // scales.shape[1], axis=1) * numbers.astype(np.float32)
    scales = np.repeat(scales, columns // 16 // scales.shape[1], axis=1).astype(np.float32)
    blocks = np.empty((rows, columns // 32, WIDE_BYTES), np.uint8)
    blocks[..., :8] = scales.reshape(rows, -1, 2).view(np.uint8)
    blocks[..., 8:] = weights.values.reshape(rows, -1, 32).view(np.uint8)
    return blocks.reshape(rows, -1)
