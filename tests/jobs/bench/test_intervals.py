"""Tests of intervals for means of a sample."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llmrun.jobs.bench.intervals import Interval, half_width_of_mean, mean_of_series, proportion

BATCHES = 300


@pytest.mark.push
@pytest.mark.parametrize("kind", ["normal", "exponential", "two lengths"])
@pytest.mark.parametrize("drawn", [6, 20, 60])
def test_intervals_contain_the_mean_of_the_batch(kind: str, drawn: int) -> None:
    """The limits allow for the error of a count of 300, and for the skewness of small samples."""
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


@pytest.mark.push
@pytest.mark.parametrize("memory", [0.0, 0.5])
def test_intervals_of_series_contain_their_mean(memory: float) -> None:
    """They do so even if neighbouring parts are similar, when intervals for independent values are far too narrow."""
    random = np.random.default_rng(1)
    inside, naive = 0, 0
    for _ in range(BATCHES):
        noise = random.exponential(1, 60)
        values = np.empty(60)
        values[0] = 1
        for index in range(1, 60):
            values[index] = memory * values[index - 1] + (1 - memory) * noise[index]
        found = mean_of_series(values.tolist())
        inside += found.low <= 1 <= found.high
        naive += abs(values.mean() - 1) <= half_width_of_mean(values.tolist(), math.inf)
    assert inside / BATCHES >= 0.9
    assert naive / BATCHES < 0.8 or memory == 0


def test_a_single_part_has_an_infinite_interval() -> None:
    assert mean_of_series([3.0]) == (3.0, -math.inf, math.inf)
    assert mean_of_series([3.0, 3.0, 3.0]) == (3.0, 3.0, 3.0)


def test_proportions_of_independent_trials_have_wilson_intervals() -> None:
    """The values are those of Newcombe (1998), table I, to the precision of Student's t."""
    for hits, trials, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        found = proportion([1] * hits + [0] * (trials - hits), 1)
        assert found == pytest.approx((hits / trials, low, high), abs=2e-3)
    assert proportion([1] * 29, 1).low == pytest.approx(1 - 0.1170, abs=2e-3)


def test_trials_that_agree_within_parts_widen_the_interval() -> None:
    mixed = proportion([5] * 20, 10)
    clustered = proportion([0, 10] * 10, 10)
    assert mixed.estimate == clustered.estimate == 0.5
    assert clustered.high - clustered.low > 2 * (mixed.high - mixed.low)


def test_perplexities_are_exponentials() -> None:
    assert Interval(0, -math.inf, math.inf).exponential() == (1, 0, math.inf)
