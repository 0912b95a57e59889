"""The unpacked form of most weight types: integers, and the factors to multiply them by.

    weight = (super_scale * sub_scale) * value - super_minimum * sub_minimum

All operations are in float32 and in this order, as in ggml. If a type lacks a factor, the multiplication is skipped;
the factor is not set to 1.

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
    sub_block       number of weights that share a sub-scale: 16 or 32; types without sub-scales set it to at most the
                    number that share a super-scale
    super_scales    float32[..., n / super_block]: the f16 from the file (or half of an 8-bit float). For IQ1 and IQ2
                    it is divided by 8, for IQ3_XXS by 4, which is exact here but not always in f16
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
    """Concatenate the blocks of each row. Every array is [*rows, blocks, ...], with any axes inside a block."""

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
    """Multiply float32[..., s] factors by int16[..., s k] integers: float32[..., s k]. Without integers, return the
    factors."""
    if integers is None:
        return factors
    return (_grouped(integers, factors) * factors[..., None]).reshape(integers.shape)


def _grouped(integers: NDArray[Any], factors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Reshape [..., s k] -> float32[..., s, k], grouping the integers that share each of the s factors."""
    count = integers.shape[-1] // max(factors.shape[-1], 1)
    return integers.astype(np.float32).reshape(*factors.shape, count)
