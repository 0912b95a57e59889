"""Tests of intervals for means of a sample."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llmrun.batching.estimate.intervals import Interval, half_width_of_mean

BATCHES = 300


@pytest.mark.parametrize("kind", ["normal", "exponential", "two lengths"])
@pytest.mark.parametrize("drawn", [6, 20, 60])
def test_intervals_contain_the_mean_of_the_batch(kind: str, drawn: int) -> None:
    """For 95 % of batches, apart from the error of a count of 300 and from the skewness of small samples."""
    random = np.random.default_rng(drawn)
    batches = {
        "normal": random.normal(100, 10, (BATCHES, 120)),
        "exponential": random.exponential(100, (BATCHES, 120)),
        "two lengths": random.choice([10.0, 200.0], (BATCHES, 120)),
    }
    inside = 0
    for batch in batches[kind]:
        sample = batch[:drawn]
        inside += abs(sample.mean() - batch.mean()) <= half_width_of_mean(sample.tolist(), 120)
    assert inside / BATCHES >= (0.87 if drawn == 6 else 0.91)
    assert inside / BATCHES <= 0.995


def test_a_complete_sample_has_no_uncertainty() -> None:
    assert half_width_of_mean([1, 5, 9], 3) == 0
    assert half_width_of_mean([4, 4, 4], 100) == 0


def test_one_value_out_of_several_says_nothing() -> None:
    assert half_width_of_mean([7], 2) == math.inf


def test_equal_samples_give_equal_intervals() -> None:
    values = [3.0, 9.0, 27.0, 1.0, 5.0, 6.0, 8.0, 8.0, 9.0]
    assert half_width_of_mean(values, 50) == half_width_of_mean(values, 50) > 0


def test_intervals_scale_and_stay_within_bounds() -> None:
    interval = Interval(10, 5, 20)
    assert interval.times(2).plus(1) == (21, 11, 41)
    assert interval.within(8, 15) == (10, 8, 15)
