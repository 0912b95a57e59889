"""Q8_0: 32 weights in 34 bytes, 8.5 bits a weight.

offset  bytes  field
0       2      scale    f16
2       32     values   int8

weight[i] = scale * values[i]
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK_WEIGHTS = 32
BLOCK_BYTES = 34


def dequantize(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """uint8[..., 34 n] -> float32[..., 32 n]; one product in float32 a weight."""
    blocks = np.ascontiguousarray(raw).reshape(-1, BLOCK_BYTES)
    scale = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    with np.errstate(invalid="ignore"):  # an infinite scale times 0 is NaN, as in C
        weights = scale * blocks[:, 2:].view(np.int8).astype(np.float32)
    return weights.reshape(*raw.shape[:-1], raw.shape[-1] // BLOCK_BYTES * BLOCK_WEIGHTS)


def quantize(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """float32[..., 32 n] -> uint8[..., 34 n]. Finite weights; the widest of a block becomes 127 or -127.

    The inverse scale comes from the float32 scale, before it is rounded to f16; ties round away from zero.
    """
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, BLOCK_WEIGHTS)
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
        scaled = blocks * inverse
        integers = _round_half_away(scaled).astype(np.int8)
        halves = scale.astype("<f2")
    packed = np.concatenate([halves.view(np.uint8), integers.view(np.uint8)], axis=-1)
    return packed.reshape(*values.shape[:-1], values.shape[-1] // BLOCK_WEIGHTS * BLOCK_BYTES)


def _round_half_away(values: NDArray[np.float32]) -> NDArray[np.float32]:
    magnitude = np.abs(values)
    whole = np.floor(magnitude)
    rounded: NDArray[np.float32] = np.sign(values) * (whole + np.floor(np.float32(2) * (magnitude - whole)))
    return rounded
