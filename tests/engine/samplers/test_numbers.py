"""Tests of logarithms and powers that do not depend on the machine."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.engine.samplers import exp_of, integer_power, log, softmax


@given(st.floats(5e-324, 1.7e308))
def test_log_is_exact_to_two_units(x: float) -> None:
    assert abs(log(x) - math.log(x)) <= 2 * math.ulp(math.log(x))


@pytest.mark.parametrize("x", [1.0, math.nextafter(1, 2), math.nextafter(1, 0), 0.7071067811865475, 0.7071067811865476])
def test_log_is_exact_near_one_and_where_its_series_changes(x: float) -> None:
    assert abs(log(x) - math.log(x)) <= 2 * math.ulp(math.log(x))


@given(st.floats(-690, 690))
def test_exp_is_exact_to_three_units(x: float) -> None:
    assert abs(exp_of(x) - math.exp(x)) <= 3 * math.ulp(math.exp(x))
    assert (exp_of(-1e9), exp_of(1e9)) == (0.0, math.inf)


@given(st.floats(1, 100), st.integers(0, 150))
def test_integer_powers_are_powers(base: float, exponent: int) -> None:
    assert integer_power(base, exponent) == pytest.approx(base**exponent, rel=1e-13)


def test_the_bits_are_fixed_for_ever() -> None:
    """Other bits would change the text of seeds, so these numbers must never be updated."""
    assert [log(x).hex() for x in (2.0, 10.0, 1e-3)] == [
        "0x1.62e42fefa39efp-1",
        "0x1.26bb1bbb55516p+1",
        "-0x1.ba18a998fffa0p+2",
    ]
    assert [exp_of(x).hex() for x in (1.0, -2.5)] == ["0x1.5bf0a8b145769p+1", "0x1.50385c094f425p-4"]


def test_entropy_is_that_of_equal_shares() -> None:
    assert softmax(np.zeros(16)).entropy == pytest.approx(math.log(16))
    assert softmax(np.array([0.0, 0.0, -np.inf])).entropy == pytest.approx(math.log(2))
