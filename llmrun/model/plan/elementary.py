"""Logarithms, powers, cosines and sines with the same bits on every machine.

The last bit of NumPy's and the C library's functions depends on the processor and the library: with and without
AVX-512, NumPy's float64 cosines differ in one of 80 values, and its powers in one of 32. The functions here use
integers, decimal arithmetic, whose results are specified to the last digit, and operations whose rounding IEEE 754
defines.
"""

from __future__ import annotations

from decimal import Context, Decimal
from math import pi
from typing import TYPE_CHECKING

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
