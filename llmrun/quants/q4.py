"""Q4_0 and Q4_1: 32 weights of 4 bits, with one scale, or with a scale and a minimum.

    Q4_0, 18 bytes, 4.5 bits a weight        Q4_1, 20 bytes, 5 bits a weight

    offset  bytes  field                     offset  bytes  field
    0       2      scale    f16              0       2      scale    f16
    2       16     nibbles                   2       2      minimum  f16
                                             4       16     nibbles

    weight[i] = scale * (nibble[i] - 8)      weight[i] = scale * nibble[i] + minimum

Byte j of the nibbles holds weight j in its low half and weight j + 16 in its high half.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK_WEIGHTS = 32
Q4_0_BYTES = 18
Q4_1_BYTES = 20


def dequantize_q4_0(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """uint8[..., 18 n] -> float32[..., 32 n]; one product in float32 a weight."""
    blocks = np.ascontiguousarray(raw).reshape(-1, Q4_0_BYTES)
    scale = _halves(blocks[:, 0:2])
    with np.errstate(invalid="ignore"):  # an infinite scale times 0 is NaN, as in C
        weights = scale * (_nibbles(blocks[:, 2:]) - np.float32(8))
    return weights.reshape(*raw.shape[:-1], raw.shape[-1] // Q4_0_BYTES * BLOCK_WEIGHTS)


def dequantize_q4_1(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """uint8[..., 20 n] -> float32[..., 32 n]; a product and a sum in float32 a weight, each rounded."""
    blocks = np.ascontiguousarray(raw).reshape(-1, Q4_1_BYTES)
    scale, minimum = _halves(blocks[:, 0:2]), _halves(blocks[:, 2:4])
    with np.errstate(invalid="ignore"):
        weights = scale * _nibbles(blocks[:, 4:]) + minimum
    return weights.reshape(*raw.shape[:-1], raw.shape[-1] // Q4_1_BYTES * BLOCK_WEIGHTS)


def quantize_q4_0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """float32[..., 32 n] -> uint8[..., 18 n]. Finite weights; the widest becomes -8 times the scale."""
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, BLOCK_WEIGHTS)
    widest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1, keepdims=True), axis=-1)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        scale = widest / np.float32(-8)
        levels = np.trunc(blocks * _inverse(scale) + np.float32(8.5))
        header = scale.astype("<f2").view(np.uint8)
    packed = np.concatenate([header, _pack(levels)], axis=-1)
    return packed.reshape(*values.shape[:-1], values.shape[-1] // BLOCK_WEIGHTS * Q4_0_BYTES)


def quantize_q4_1(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """float32[..., 32 n] -> uint8[..., 20 n]. Finite weights; the least becomes 0, the greatest 15."""
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, BLOCK_WEIGHTS)
    minimum, maximum = blocks.min(axis=-1, keepdims=True), blocks.max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        scale = (maximum - minimum) / np.float32(15)
        levels = np.trunc((blocks - minimum) * _inverse(scale) + np.float32(0.5))
        header = [half.astype("<f2").view(np.uint8) for half in (scale, minimum)]
    packed = np.concatenate([*header, _pack(levels)], axis=-1)
    return packed.reshape(*values.shape[:-1], values.shape[-1] // BLOCK_WEIGHTS * Q4_1_BYTES)


def _halves(field: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.ascontiguousarray(field).view("<f2").astype(np.float32)


def _nibbles(field: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.concatenate([field & np.uint8(15), field >> np.uint8(4)], axis=-1).astype(np.float32)


def _inverse(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """1 / scale in float32, taken before the scale is rounded to f16; 0 for a block of equal weights."""
    return np.where(scale == 0, np.float32(0), np.float32(1) / scale)


def _pack(levels: NDArray[np.float32]) -> NDArray[np.uint8]:
    with np.errstate(invalid="ignore"):
        nibbles: NDArray[np.uint8] = levels.astype(np.uint8).clip(0, 15)
    return nibbles[:, :16] | (nibbles[:, 16:] << np.uint8(4))
