"""What most weight types are, once their bits are sorted out: integers, and the factors they are multiplied with.

    weight = (super_scale * sub_scale) * value - super_minimum * sub_minimum

in float32, in this order: ggml's. A factor that a type does not have is left out with its product, not set to 1.

An f16 has 11 significant bits, and no type has a sub-scale and a value with more than 12 between them, so no product is
ever rounded, whichever is taken first; only the difference is, once.
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

    values          int8[..., n]: what is stored, after its offset, table or grid; the sign included
    super_block     weights that share a super-scale: 16, 32 or 256
    sub_block       weights that share a sub-scale; where there are none, no more than share a super-scale: 16 or 32
    super_scales    float32[..., n / super_block]: the file's own f16 (or half an 8-bit float), widened. Of IQ1 and IQ2
                    it is an eighth of that, of IQ3_XXS a quarter: exact here, but not always in an f16
    sub_scales      int16[..., n / sub_block]
    super_minimums  float32[..., n / super_block]: what is taken off; of Q4_1 and Q5_1 the stored minimum, negated
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
    """The blocks of each row put one after the other: every array is [*rows, blocks, ...], any axes within a block."""

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
    """float32[..., n]: the formula above. No warnings: an infinite scale times 0 is NaN, as in C."""
    with np.errstate(invalid="ignore", over="ignore"):
        scales = _products(weights.super_scales, weights.sub_scales)
        products = _grouped(weights.values, scales) * scales[..., None]
        if weights.super_minimums is not None:
            minimums = _products(weights.super_minimums, weights.sub_minimums)
            products = products - minimums[..., None]
    return products.reshape(weights.values.shape)


def _products(factors: NDArray[np.float32], integers: NDArray[np.int16] | None) -> NDArray[np.float32]:
    """float32[..., s] and int16[..., s k] or None -> float32[..., s k] or float32[..., s]."""
    if integers is None:
        return factors
    return (_grouped(integers, factors) * factors[..., None]).reshape(integers.shape)


def _grouped(integers: NDArray[Any], factors: NDArray[np.float32]) -> NDArray[np.float32]:
    """[..., s k] -> float32[..., s, k]: the integers that share each of the s factors."""
    count = integers.shape[-1] // max(factors.shape[-1], 1)
    return integers.astype(np.float32).reshape(*factors.shape, count)
