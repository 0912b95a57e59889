"""Tests of intervals for means of a sample."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llmrun.jobs.bench.intervals import ENOUGH_PARTS, Interval, mean_of_series, proportion
from llmrun.jobs.bench.statistics import widening

BATCHES = 300


def test_equal_samples_give_equal_intervals() -> None:
    values = [3.0, 9.0, 27.0, 1.0, 5.0, 6.0, 8.0, 8.0, 9.0]
    assert mean_of_series(values) == mean_of_series(values)


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
        naive += abs(values.mean() - 1) <= (found.high - found.low) / 2 / widening(values)
    assert inside / BATCHES >= 0.9
    assert naive / BATCHES < 0.8 or memory == 0


def test_few_parts_have_an_infinite_interval() -> None:
    for count in range(1, ENOUGH_PARTS):
        assert mean_of_series([3.0] * count) == (3.0, -math.inf, math.inf)
        assert proportion([5] * count, 10) == (0.5, -math.inf, math.inf)
    assert mean_of_series([3.0] * ENOUGH_PARTS) == (3.0, 3.0, 3.0)


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
