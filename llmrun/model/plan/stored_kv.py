"""NumPy references for the keys and values that are read back from each type of KV cache (layouts/kv.py).

Before the cache rounds keys or values to 8 or 4 bits, it multiplies them by a Hadamard matrix. A few features of
SmolLM2's keys are many times larger than the others and dominate the scale of their group. The rotation evens them out,
and a query rotated in the same way has the same dot product with the key. The weighted sum of the values is rotated
back. docs/kv-cache.md shows what this and the choices below gain.

A key is rotated as a whole, and a value in parts of 32 features. A matrix of n x n exists here only for powers of two,
so a head of 80 features is rotated in parts of 64 and 16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmrun.formats.layouts.kv import GROUP, KVType, parse_kv_type
from llmrun.formats.quants.table_quants import IQ4_VALUES as TABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

# An input between two neighbouring entries of the table becomes the lower one up to this bound, inclusive.
BOUNDS = tuple(float(low + high) / 2 for low, high in zip(TABLE[:-1].tolist(), TABLE[1:].tolist(), strict=True))
LEAST = 1e-30  # groups whose numbers are all smaller are stored as zeros; float16 scales end at 6e-8

# The factors by which groups of 4 bits are multiplied in addition, so that the largest magnitude is not always exactly
# the end of the table. With the first factor alone, the divergence was 16 % larger.
STRETCHES = (1.0, 0.87, 1.08)

_VALUE_PART = 32
_LANES = 16


def key_parts(head_size: int) -> tuple[int, ...]:
    """Return the sizes of the parts in which keys and queries are rotated: powers of two, largest first."""
    return tuple(1 << bit for bit in reversed(range(head_size.bit_length())) if head_size >> bit & 1)


def value_parts(value_size: int) -> tuple[int, ...]:
    """Return the sizes of the parts in which values are rotated."""
    whole, rest = divmod(value_size, _VALUE_PART)
    return (_VALUE_PART,) * whole + ((rest,) if rest else ())


def stored_factor(part: int) -> float:
    """Return the factor of a part of a key or value before it is multiplied by the matrix, whose entries are 1 and -1.

    Factors are powers of two, so the products are exact. The two factors of a part multiply to 1 / its size.
    """
    return 2.0 ** -((part.bit_length() - 1) // 2)


def read_factor(part: int) -> float:
    """Return the factor of a part of a query, or of a weighted sum of values."""
    return 1 / (part * stored_factor(part))


class Stored(NamedTuple):
    """Keys or values as a cache holds them, rotated if their type has scales.

    numbers  float32[..., size]: numbers rounded to float16, or integers
    scales   float32[..., groups], or None without scales
    """

    numbers: NDArray[np.float32]
    scales: NDArray[np.float32] | None

    def read(self) -> NDArray[np.float32]:
        """Return the numbers times their scales, float32[..., size]."""
        if self.scales is None:
            return self.numbers
        with np.errstate(invalid="ignore", over="ignore"):
            result: NDArray[np.float32] = (
                self.numbers * np.repeat(self.scales, GROUP, axis=-1)[..., : self.numbers.shape[-1]]
            )
        return result

    def at(self, positions: slice) -> Stored:
        """Return the keys or values at some positions, which are the first axis."""
        return Stored(self.numbers[positions], None if self.scales is None else self.scales[positions])

    def of_heads(self, heads: NDArray[np.int64]) -> Stored:
        """Return the keys or values of some heads, which are the second axis."""
        return Stored(self.numbers[:, heads], None if self.scales is None else self.scales[:, heads])


def enter_reference(
    queries: NDArray[np.float32], keys: NDArray[np.float32], values: NDArray[np.float32], kv_type: str
) -> tuple[NDArray[np.float32], Stored, Stored]:
    """Return (queries, keys, values) as attention uses them, given arrays float32[..., size]."""
    types, parts = parse_kv_type(kv_type), key_parts(keys.shape[-1])
    if types.keys.has_scales:
        queries = hadamard_reference(queries, parts, read_factor)
        keys = hadamard_reference(keys, parts, stored_factor)
    if types.values.has_scales:
        values = hadamard_reference(values, value_parts(values.shape[-1]), stored_factor)
    return queries, store_reference(keys, types.keys), store_reference(values, types.values)


def rotated_back_reference(values: NDArray[np.float32], kind: KVType) -> NDArray[np.float32]:
    """Rotate back values or weighted sums of values, float32[..., value size], if their type has scales."""
    return hadamard_reference(values, value_parts(values.shape[-1]), read_factor) if kind.has_scales else values


def hadamard_reference(
    x: NDArray[np.float32], parts: Sequence[int], factor: Callable[[int], float]
) -> NDArray[np.float32]:
    """Multiply each part of float32[..., size] by its factor and the Hadamard matrix of its size.

    The entries of the matrix are 1 and -1.
    """
    rotated = np.empty_like(x)
    first = 0
    with np.errstate(over="ignore", invalid="ignore"):
        for size in parts:
            part = x[..., first : first + size] * np.float32(factor(size))
            lanes = np.arange(size)
            distance = 1
            while distance < size:
                partners = part[..., lanes ^ distance]
                part = np.where(lanes & distance, partners - part, partners + part)
                distance *= 2
            rotated[..., first : first + size] = part
            first += size
    return rotated


def store_reference(x: NDArray[np.float32], kind: KVType) -> Stored:
    """Round rotated keys or values float32[..., size] as the cache does."""
    if not kind.has_scales:
        with np.errstate(over="ignore"):
            return Stored(x.astype(np.float16).astype(np.float32), None)
    return Stored(*quantized_reference(x, kind))


def quantized_reference(x: NDArray[np.float32], kind: KVType) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return (integers float32[..., size], scales float32[..., groups]) of rotated keys or values float32[..., size].

    A group with a NaN or an infinity has the scale NaN.
    """
    starts = range(0, x.shape[-1], GROUP)
    group = _group8_reference if kind.bits == 8 else _group4_reference
    with np.errstate(all="ignore"):
        parts = [group(x[..., at : at + GROUP]) for at in starts]
    integers, scales = zip(*parts, strict=True)
    return np.concatenate(integers, axis=-1), np.concatenate(scales, axis=-1)


def _group8_reference(x: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Quantize a group to -127..127, with a scale that represents its largest magnitude."""
    scale = _half(np.abs(x).max(-1, keepdims=True) / np.float32(127) + _nan_unless_finite(x))
    inverse = np.where(scale > 0, np.float32(1) / scale, np.float32(0))
    return np.nan_to_num(np.clip(np.rint(x * inverse), -127, 127)), scale


def _group4_reference(x: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Quantize a group to entries of the table.

    The number of the largest magnitude becomes about -127, the entry of the largest magnitude. Each factor in
    STRETCHES gives a set of integers, with a scale that minimizes the sum of squared errors. The set with the smallest
    sum is stored.
    """
    high, low = x.max(-1, keepdims=True), -x.min(-1, keepdims=True)
    top = np.where(high > low, high, -low)
    inverse = np.where(np.abs(top) > LEAST, np.float32(TABLE[0]) / top, np.float32(0))
    best, best_scale, best_gain = _stretched_reference(x, inverse, STRETCHES[0])
    for stretch in STRETCHES[1:]:
        integers, scale, gain = _stretched_reference(x, inverse, stretch)
        better = gain > best_gain
        best, best_scale = np.where(better, integers, best), np.where(better, scale, best_scale)
        best_gain = np.where(better, gain, best_gain)
    return best, _half(best_scale + _nan_unless_finite(x))


def _stretched_reference(
    x: NDArray[np.float32], inverse: NDArray[np.float32], stretch: float
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Round a group after multiplying it by `inverse` and `stretch`. Returns (integers, best scale, gain).

    The gain is the amount by which the best scale reduces the sum of squared errors, compared with a scale of 0.
    """
    scaled = np.nan_to_num(x * (inverse * np.float32(stretch)), nan=-np.inf)
    integers = TABLE[np.searchsorted(np.array(BOUNDS, np.float32), scaled)].astype(np.float32)
    dot = _sum_reference(x * integers)
    scale = dot / _sum_reference(integers * integers)
    return integers, scale, dot * scale


def _half(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return x.astype(np.float16).astype(np.float32)


def _nan_unless_finite(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return 0 for groups of finite numbers and NaN for the others, float32[..., 1]."""
    nothing: NDArray[np.float32] = (x * np.float32(0)).sum(-1, keepdims=True)
    return nothing


def _sum_reference(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Add up a group float32[..., 16 or 32] in the order of the kernel: vectors of 16, then halves of a vector."""
    total = x[..., :_LANES]
    for at in range(_LANES, x.shape[-1], _LANES):
        total = total + x[..., at : at + _LANES]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total
