"""Tests of the arrival times of an open loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.jobs.bench.serving.driving import arrival_times

RATES = st.floats(0.01, 1000)


@given(RATES, st.integers(0, 1 << 32), st.integers(0, 3000), st.floats(0.05, 50))
def test_times_increase_and_repeat_with_the_seed(rate: float, seed: int, requests: int, burstiness: float) -> None:
    times = arrival_times(rate, seed, requests=requests, burstiness=burstiness)
    assert len(times) == requests
    assert all(later >= earlier for earlier, later in zip([0.0, *times], times, strict=False))
    assert times == arrival_times(rate, seed, requests=requests, burstiness=burstiness)


@given(RATES, st.integers(0, 1 << 32), st.floats(0.1, 3))
def test_a_duration_cuts_the_same_times(rate: float, seed: int, duration: float) -> None:
    times = arrival_times(rate, seed, duration=duration)
    assert all(time < duration for time in times)
    assert times == [time for time in arrival_times(rate, seed, requests=len(times) + 1) if time < duration]


def test_gaps_have_the_mean_and_the_shape() -> None:
    """The coefficient of variation of gamma gaps is 1/sqrt(burstiness), which is 1 for a Poisson process."""
    for burstiness in (0.25, 1.0, 16.0):
        gaps = np.diff(arrival_times(4.0, 1, requests=20_000, burstiness=burstiness))
        assert gaps.mean() == pytest.approx(0.25, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_different_seeds_give_different_times() -> None:
    assert arrival_times(1.0, 1, requests=3) != arrival_times(1.0, 2, requests=3)


@pytest.mark.parametrize(
    ("rate", "burstiness", "requests"), [(0.0, 1.0, 1), (math.inf, 1.0, 1), (math.nan, 1.0, 1), (1, 0, 1), (1, 1, None)]
)
def test_impossible_arrivals_are_refused(rate: float, burstiness: float, requests: int | None) -> None:
    with pytest.raises(ValueError, match="arrivals"):
        arrival_times(rate, 0, requests=requests, burstiness=burstiness)
