"""Confidence intervals for means and proportions of measured values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from llmrun.jobs.bench.statistics import ENOUGH_ROUNDS, student_quantile, widening

LEVEL: Final = 0.95
# An interval needs this many parts. With 2 or 3 parts, Student's t multiplies an uncertain standard error by 12.7 or
# 4.3, so the interval of a perplexity ratio can reach from 0.01 to 26,000.
ENOUGH_PARTS: Final = 4
_RESAMPLES: Final = 1999
_MOST_FREEDOM: Final = 200  # With more degrees of freedom than this, Student's t is treated as normal.
_SEED: Final = 20250101  # The same sample always gives the same interval.


class Interval(NamedTuple):
    """An estimate with its 95 % confidence interval, which is infinite if there is too little data."""

    estimate: float
    low: float
    high: float

    def exponential(self) -> Interval:
        """Return the interval of the exponential of the estimated value."""
        with np.errstate(over="ignore"):
            return Interval(*np.exp(np.array(self)).tolist())


def mean_of_series(values: Sequence[float]) -> Interval:
    """Return the mean of consecutive parts of a longer series, such as chunks of a text, with its confidence interval.

    The parts must have the same length. The distribution of the parts may be skewed, so the interval is a symmetric
    bootstrap-t interval, widened if neighbouring parts are correlated. With fewer than ENOUGH_PARTS parts, the interval
    is infinite.
    """
    numbers = np.asarray(values, np.float64)
    mean, half = float(numbers.mean()), math.inf
    if numbers.size >= ENOUGH_PARTS:
        error = float(numbers.std(ddof=1)) / math.sqrt(numbers.size)
        half = _reach(numbers, error) * error * widening(numbers) if error else 0.0
    return Interval(mean, mean - half, mean + half)


def proportion(hits: Sequence[int], trials: int) -> Interval:
    """Return the proportion of hits with its Wilson interval.

    hits    the number of hits in each part of the series; parts of one trial each are independent trials
    trials  the number of trials in each part

    Hits within a part may be correlated, so the number of trials is reduced by the design effect: the variance between
    the parts, divided by the variance that independent trials would have. With fewer than ENOUGH_PARTS parts of several
    trials, the interval is infinite.
    """
    counts = np.asarray(hits, np.float64)
    n = counts.size * trials
    share = float(counts.sum()) / n
    if trials > 1 and counts.size < ENOUGH_PARTS:
        return Interval(share, -math.inf, math.inf)
    effect = 1.0
    independent = share * (1 - share) / n
    if trials > 1 and independent > 0:
        between = float((counts / trials).var(ddof=1)) / counts.size
        effect = max(1.0, between / independent * widening(counts) ** 2)
    effective = n / effect
    freedom = _MOST_FREEDOM if trials == 1 else min(counts.size - 1, _MOST_FREEDOM)
    z = student_quantile(LEVEL, freedom)
    centre = (share + z * z / (2 * effective)) / (1 + z * z / effective)
    half = z / (1 + z * z / effective) * math.sqrt(share * (1 - share) / effective + (z / (2 * effective)) ** 2)
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))


def _reach(numbers: np.ndarray[tuple[int], np.dtype[np.float64]], error: float) -> float:
    """Return the half-width of the interval in standard errors, but at least the half-width of Student's t interval."""
    n = numbers.size
    normal = student_quantile(LEVEL, n - 1)
    if n < ENOUGH_ROUNDS:
        return normal
    drawn = numbers[np.random.default_rng(_SEED).integers(0, n, (_RESAMPLES, n))]
    errors = drawn.std(axis=1, ddof=1) / math.sqrt(n)
    distances = np.abs(drawn.mean(axis=1) - numbers.mean())
    # A resample that repeats a single value does not contribute to the width.
    far = distances[errors > error * 1e-9] / errors[errors > error * 1e-9]
    rank = min(math.ceil(LEVEL * (far.size + 1)), far.size)
    return max(normal, float(np.partition(far, rank - 1)[rank - 1]))
