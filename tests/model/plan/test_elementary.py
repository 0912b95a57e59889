"""Tests of functions whose bits must not depend on the machine: their errors, and the bits themselves."""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmrun.model.plan.elementary import Rope, cosines_and_sines, inverse_powers, log, softplus, turns

POSITIVE = st.floats(1e-300, 1e300)
# The digest of many values. It must be the same on every processor and with every version of NumPy.
DIGEST = "6b9c3a9ef6dccca8"


def digest(*arrays: NDArray[np.generic]) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()[:16]


@given(POSITIVE)
def test_logarithms_are_within_a_unit_of_the_c_librarys(x: float) -> None:
    assert abs(log(x) - math.log(x)) <= math.ulp(math.log(x))


@given(st.floats(-700, 1e9))
def test_softplus_is_within_two_units_of_the_c_librarys(x: float) -> None:
    expected = max(x, 0) + math.log1p(math.exp(-abs(x)))
    assert abs(softplus(x) - expected) <= 2 * math.ulp(expected)


def test_softplus_of_very_small_numbers_is_zero() -> None:
    assert softplus(-1e9) == 0


@given(st.floats(1.0, 1e9), st.integers(1, 200))
def test_powers_are_within_two_units_of_pythons(base: float, count: int) -> None:
    expected = np.array([base ** -(index / count) for index in range(count)])
    # An error in the exponent's last bit is multiplied by the logarithm of the base.
    tolerance = (2 + math.log(base)) * 2.0**-52
    np.testing.assert_allclose(inverse_powers(base, count), expected, rtol=tolerance, atol=0)


def test_powers_that_are_too_large_are_infinite() -> None:
    assert inverse_powers(1e-200, 2).tolist() == [1.0, 1e100]
    assert inverse_powers(5e-324, 100)[-1] == np.inf


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=4), st.integers(0, (1 << 27) - 1))
def test_multiples_of_turns_are_exact(radians: list[float], position: int) -> None:
    """A multiple is off by less than one unit of 2^-64 turns per position. 2 pi is computed from Machin's formula."""
    units = turns(np.array(radians))
    multiples = np.uint64(position) * units
    for angle, multiple in zip(radians, multiples.tolist(), strict=True):
        exact = Fraction(angle) * position / (2 * PI)
        distance = (exact - Fraction(multiple, 1 << 64)) % 1
        assert min(distance, 1 - distance) <= Fraction(position + 1, 1 << 64)


def inverse_tangent(inverse: int) -> Fraction:
    """Return atan(1 / inverse) to 100 digits."""
    total, term, number = Fraction(0), Fraction(1, inverse), 1
    while term > Fraction(1, 10**100):
        total += term / number if number % 4 == 1 else -term / number
        term, number = term / inverse**2, number + 2
    return total


PI = 4 * (4 * inverse_tangent(5) - inverse_tangent(239))


@given(st.integers(0, 2**64 - 1))
def test_cosines_and_sines_have_small_errors(unit: int) -> None:
    angle = unit / 2**64 * 2 * math.pi  # up to 1e-15 off
    [cosine], [sine] = cosines_and_sines(np.array([unit], np.uint64))
    assert cosine == pytest.approx(math.cos(angle), abs=5e-13)
    assert sine == pytest.approx(math.sin(angle), abs=5e-13)


def test_quarter_turns_are_exact() -> None:
    quarters = np.arange(4, dtype=np.uint64) << np.uint64(62)
    np.testing.assert_array_equal(cosines_and_sines(quarters), [[1, 0, -1, 0], [0, 1, 0, -1]])


def test_rotations_are_those_of_the_angles() -> None:
    frequencies = inverse_powers(10_000.0, 32)
    rope = Rope(frequencies, magnitude=1.5, growth=(0.25, 1000))
    positions = np.array([0, 1, 2, 999, 1000, 131_071], np.int32)
    angles = positions[:, None] * frequencies
    size = 1.5 * (1 + 0.25 * np.log(1 + positions // 1000))[:, None]
    expected = np.stack([size * np.cos(angles), size * np.sin(angles)], axis=-1)
    np.testing.assert_allclose(rope.rotations(positions), expected, rtol=0, atol=2e-7)


def test_the_bits_are_the_same_everywhere() -> None:
    units = turns(inverse_powers(500_000.0, 64))
    rotations = cosines_and_sines(np.arange(5000, dtype=np.uint64)[:, None] * units)
    logarithms = np.array([log(number) for number in range(1, 1000)])
    assert digest(inverse_powers(10_000.0, 80), units, rotations, logarithms) == DIGEST
