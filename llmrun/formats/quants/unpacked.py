"""The unpacked form of the integer weight types: integers, and the factors that scale them.

    weight = (super_scale * sub_scale) * value - super_minimum * sub_minimum

All operations are in float32 and in this order, as in ggml. If a type lacks a factor, its multiplication is skipped.

An f16 has 11 significant bits, and in every type the sub-scale and the value have at most 12 together. The products are
therefore exact in any order. Only the subtraction rounds, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Unpacked:
    """Rows of n weights.

    values          int8[..., n]: the stored values after applying the offset, table or grid, and the sign
    super_block     number of weights that share a super-scale: 16, 32 or 256
    sub_block       number of weights that share a sub-scale: 16 or 32; for types without sub-scales, a number that is
                    at most `super_block`
    super_scales    float32[..., n / super_block]: the f16 scale from the file, or half of an 8-bit float scale. It is
                    divided by 8 for IQ1 and IQ2 and by 4 for IQ3_XXS, which is exact in float32 but not always in f16
    sub_scales      int16[..., n / sub_block]
    super_minimums  float32[..., n / super_block], subtracted; for Q4_1 and Q5_1 it is the negated stored minimum
    sub_minimums    int16[..., n / sub_block]
    """

    values: NDArray[np.int8]
    super_block: int
    sub_block: int
    super_scales: NDArray[np.float32]
    sub_scales: NDArray[np.int16] | None = None
    super_minimums: NDArray[np.float32] | None = None
    sub_minimums: NDArray[np.int16] | None = None


Unpack = Callable[[NDArray[np.uint8]], Unpacked]


def joined(
    n_rows_axes: int,
    values: NDArray[np.int8],
    *,
    super_scales: NDArray[np.float32],
    super_block: int,
    sub_block: int,
    sub_scales: NDArray[Any] | None = None,
    super_minimums: NDArray[np.float32] | None = None,
    sub_minimums: NDArray[Any] | None = None,
) -> Unpacked:
    """Concatenate the blocks of each row. Every array has shape [*rows, blocks, ...] with any number of inner axes."""

    def join(array: NDArray[Any], dtype: Any) -> Any:
        rows, within = array.shape[:n_rows_axes], array.shape[n_rows_axes:]
        return array.astype(dtype, copy=False).reshape(*rows, math.prod(within))

    return Unpacked(
        join(values, np.int8),
        super_block,
        sub_block,
        join(super_scales, np.float32),
        None if sub_scales is None else join(sub_scales, np.int16),
        None if super_minimums is None else join(super_minimums, np.float32),
        None if sub_minimums is None else join(sub_minimums, np.int16),
    )


def dequantize(weights: Unpacked) -> NDArray[np.float32]:
    """Compute the weights float32[..., n] by the formula above.

    Warnings are suppressed: an infinite scale times 0 is NaN, as in C.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        scales = _products(weights.super_scales, weights.sub_scales)
        products = _grouped(weights.values, scales) * scales[..., None]
        if weights.super_minimums is not None:
            minimums = _products(weights.super_minimums, weights.sub_minimums)
            products = products - minimums[..., None]
    return products.reshape(weights.values.shape)


def _products(factors: NDArray[np.float32], integers: NDArray[np.int16] | None) -> NDArray[np.float32]:
    """Multiply factors float32[..., s] by integers int16[..., s k] -> float32[..., s k].

    Without integers, return the factors.
    """
    if integers is None:
        return factors
    return (_grouped(integers, factors) * factors[..., None]).reshape(integers.shape)


def _grouped(integers: NDArray[Any], factors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Reshape integers [..., s k] -> float32[..., s, k], so that each of the s factors has its own row."""
    count = integers.shape[-1] // max(factors.shape[-1], 1)
    return integers.astype(np.float32).reshape(*factors.shape, count)
