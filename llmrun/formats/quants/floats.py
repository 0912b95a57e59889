"""Weights stored as floating-point numbers: F32, F16 and BF16.

A block is a single weight of 4, 2 or 2 little-endian bytes. F16 is IEEE 754 binary16. BF16 is the upper half of a
binary32, with the same exponent and 7 bits of fraction.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmrun.formats.quants.weight_type import WeightType, all_set, words16, words32


def dequantize_f32(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Decode uint8[..., 4 n] -> float32[..., n]. Returns a view of `raw` if its memory layout allows it."""
    return np.ascontiguousarray(raw).view("<f4").astype(np.float32, copy=False)


def quantize_f32(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Encode float32[..., n] -> uint8[..., 4 n]. The result is exact."""
    return np.ascontiguousarray(values, "<f4").view(np.uint8)


def dequantize_f16(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Decode f16 numbers: uint8[..., 2 n] -> float32[..., n]. The result is exact."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def quantize_f16(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Encode float32[..., n] -> uint8[..., 2 n], rounding to nearest even. Numbers beyond 65504 become infinite."""
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values).astype("<f2").view(np.uint8)


def dequantize_bf16(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Decode bf16 numbers: uint8[..., 2 n] -> float32[..., n]. The result is exact."""
    halves = np.ascontiguousarray(raw).view("<u2").astype(np.uint32)
    return (halves << np.uint32(16)).view(np.float32)


def quantize_bf16(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Encode float32[..., n] -> uint8[..., 2 n], rounding to nearest even. NaNs become quiet NaNs."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    # 0x7FFF is just below half the value of the lowest remaining bit. If that bit is set, 1 more is added, which rounds
    # ties to even.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x0040)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, quiet_nan, rounded).astype("<u2").view(np.uint8)


def _unsound_f32(blocks: NDArray[np.uint8]) -> NDArray[np.bool_]:
    return all_set(words32(blocks)[:, 0], np.uint32(0x7F800000))


def _unsound_bf16(blocks: NDArray[np.uint8]) -> NDArray[np.bool_]:
    return all_set(words16(blocks)[:, 0], np.uint16(0x7F80))


TYPES = (
    WeightType("F32", 0, 1, 4, dequantize_f32, quantize_f32, other_scales=_unsound_f32),
    WeightType("F16", 1, 1, 2, dequantize_f16, quantize_f16, half_fields=(0,)),
    WeightType("BF16", 30, 1, 2, dequantize_bf16, quantize_bf16, other_scales=_unsound_bf16),
)
