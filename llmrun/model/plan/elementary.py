"""Elementary functions with the same bits on every machine, and rotary position embeddings (RoPE).

The last bit of NumPy's and the C library's functions depends on the processor and the library: with and without
AVX-512, NumPy's float64 cosines differ in one of 80 values, and its powers in one of 32. The logarithms, powers,
cosines and sines here use integers, decimal arithmetic, whose results are specified to the last digit, and operations
whose rounding IEEE 754 defines.

The `*_reference` functions use NumPy's functions, and the twins of several ops share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import Context, Decimal
from enum import StrEnum
from math import pi
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DIGITS = Context(prec=40)
_INVERSE_BITS = 192
_INVERSE_OF_TWO_PI = 0x28BE60DB9391054A7F09D5F47D4D377036D8A5664F10E410  # 2^192 / (2 pi)

_SAME_AS_SOFTPLUS = 64  # softplus of numbers above this is the number itself

_RADIANS = pi / 2**63  # of the smallest part of a turn, 2^-64 turns
# Taylor coefficients in r^2 of cos(r) and sin(r) / r, highest first. For |r| up to pi / 4, the error is below 4e-13.
_COEFFICIENTS = (
    (1 / 479001600, 1 / 6227020800),
    (-1 / 3628800, -1 / 39916800),
    (1 / 40320, 1 / 362880),
    (-1 / 720, -1 / 5040),
    (1 / 24, 1 / 120),
    (-1 / 2, -1 / 6),
    (1.0, 1.0),
)


def log(x: float) -> float:
    """Return the natural logarithm of a positive number, correctly rounded."""
    return float(_DIGITS.ln(Decimal(x)))


def softplus(x: float) -> float:
    """Return log(1 + exp(x)), correctly rounded."""
    if x > _SAME_AS_SOFTPLUS:
        return x
    power = _DIGITS.exp(Decimal(x))
    if x < -_SAME_AS_SOFTPLUS / 2:  # 1 + power would lose digits; later terms are below 10^-27 of the sum
        return float(_DIGITS.fma(-power / 2, power, power))
    return float(_DIGITS.ln(_DIGITS.add(1, power)))


def inverse_powers(base: float, count: int) -> NDArray[np.float64]:
    """Return base ** -(i / count) for i from 0 up to, but not including, `count`, as float64[count].

    They are correctly rounded, except for about one in 10^20. `base` must be positive. Powers too large for a float64
    are infinite.
    """
    factor = _DIGITS.exp(-_DIGITS.ln(Decimal(base)) / count)
    powers = [Decimal(1)]
    while len(powers) < count:
        powers.append(_DIGITS.multiply(powers[-1], factor))
    return np.array([float(power) for power in powers])


def turns(radians: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Return angles in units of 2^-64 turns, without whole turns, as a uint64 array of the same length.

    The result is exact to the unit for angles below 2^60. A multiple of an angle is the product of the numbers in
    wrapping arithmetic.
    """
    found = []
    for angle in radians.tolist():
        numerator, denominator = angle.as_integer_ratio()
        found.append(numerator * _INVERSE_OF_TWO_PI // (denominator << (_INVERSE_BITS - 64)) % 2**64)
    return np.array(found, np.uint64)


def cosines_and_sines(angles: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return the cosine and sine of angles, which are given in units of 2^-64 turns, as float64[2, ...].

    The error is below 4e-13.
    """
    quadrants = (angles + np.uint64(1 << 61)) >> np.uint64(62)  # of the nearest multiple of a quarter turn
    r = (angles - (quadrants << np.uint64(62))).view(np.int64) * _RADIANS
    square = r * r
    both = np.empty((2, *angles.shape))
    for function, values in enumerate(both):
        np.multiply(square, _COEFFICIENTS[0][function], out=values)
        for coefficients in _COEFFICIENTS[1:-1]:
            values += coefficients[function]
            values *= square
        values += _COEFFICIENTS[-1][function]
    both[1] *= r
    found = np.where((quadrants & np.uint64(1)).astype(np.bool_), both[::-1], both)
    signs = found.view(np.uint64)  # cosines are negative in quadrants 1 and 2, sines in 2 and 3
    signs[0] ^= (quadrants + np.uint64(1) & np.uint64(2)) << np.uint64(62)
    signs[1] ^= (quadrants & np.uint64(2)) << np.uint64(62)
    return found


def sigmoid_reference(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute 1 / (1 + exp(-x)) without overflow."""
    e = np.exp(-np.abs(x))
    top = np.where(x < 0, e, np.float32(1))
    return (top / (np.float32(1) + e)).astype(np.float32)


def softplus_reference(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute softplus, log(1 + exp(x)), without overflow."""
    result: NDArray[np.float32] = np.maximum(x, np.float32(0)) + np.log1p(np.exp(-np.abs(x)))
    return result


def soft_cap_reference(x: NDArray[np.float32], cap: float) -> NDArray[np.float32]:
    """Compute cap * tanh(x / cap)."""
    result: NDArray[np.float32] = np.float32(cap) * np.tanh(x / np.float32(cap))
    return result


def softmax_reference(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute the softmax of each row of float32[rows, width]."""
    e = np.exp(x - x.max(1, keepdims=True))
    result: NDArray[np.float32] = e / e.sum(1, keepdims=True)
    return result


class Pairing(StrEnum):
    """The ways to pair the features of a head."""

    INTERLEAVED = "interleaved"  # features 2i and 2i + 1, called "norm" in llama.cpp
    NEOX = "neox"  # features i and i + pairs


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """The rotary embedding of the first `2 * len(frequencies)` features of a head.

    frequencies  float64[pairs], radians per position
    magnitude    factor applied to the rotated features (the attention factor of YaRN and LongRoPE)
    longer       (context size, Rope): a Rope that replaces this one if the context is larger than the given size
    growth       (factor, tokens): for long contexts, queries are also multiplied by
                 1 + factor * log(1 + position // tokens)
    axes         for models with M-RoPE, the position that rotates each pair of the rows of images, intp[pairs]: 0 for
                 time, 1 for height and 2 for width
    turns        the frequencies in 2^-64 turns per position, uint64[pairs]
    """

    frequencies: NDArray[np.float64]
    pairing: Pairing = Pairing.INTERLEAVED
    magnitude: float = 1.0
    longer: tuple[int, Rope] | None = None
    growth: tuple[float, int] | None = None
    axes: NDArray[np.intp] | None = None
    turns: NDArray[np.uint64] = field(init=False)

    def __post_init__(self) -> None:
        assert self.longer is None or self.longer[1].frequencies.size == self.frequencies.size
        object.__setattr__(self, "turns", turns(self.frequencies))

    @property
    def pairs(self) -> int:
        return self.frequencies.size

    def in_context(self, size: int) -> Self:
        """Return the Rope to use at every position of a context of `size` tokens."""
        if self.longer is not None and size > self.longer[0]:
            other = self.longer[1]
            return replace(self, frequencies=other.frequencies, magnitude=other.magnitude, longer=None)
        return self

    def rotations(self, positions: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the cosines and sines of each row's angles, times `magnitude`, as float32[rows, pairs, 2].

        They are computed in float64, with the same bits on every machine.

        positions  int32[rows], or int32[rows, 3] for positions in time, height and width
        """
        if positions.ndim == 1:
            of_pairs = positions[:, None]
        else:
            of_pairs = positions[:, :1] if self.axes is None else positions[:, self.axes]
            positions = positions[:, 0]
        both = cosines_and_sines(of_pairs.astype(np.uint64) * self.turns)
        size: float | NDArray[np.float64] = self.magnitude
        if self.growth is not None:
            factor, tokens = self.growth
            size = (
                size * np.array([1 + factor * log(1 + position // tokens) for position in positions.tolist()])[:, None]
            )
        return np.stack([*(both * size).astype(np.float32)], axis=-1)


def rotations_of(ropes: Sequence[Rope], positions: NDArray[np.int32]) -> NDArray[np.float32]:
    """Concatenate the rotations of several ropes into a contiguous float32[rows, pairs of all ropes, 2].

    positions  as in `Rope.rotations`
    """
    if len(ropes) == 1:
        return ropes[0].rotations(positions)
    if not ropes:
        return np.zeros((len(positions), 0, 2), np.float32)
    return np.concatenate([rope.rotations(positions) for rope in ropes], axis=1)
