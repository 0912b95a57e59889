"""Intervals for means and totals of a few measured values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from llmrun.bench.analysis.statistics import ENOUGH_ROUNDS, student_quantile

LEVEL: Final = 0.95
_RESAMPLES: Final = 1999
_SEED: Final = 20250101  # the same sample always gives the same interval


class Interval(NamedTuple):
    """An estimate with its interval of 95 % confidence."""

    estimate: float
    low: float
    high: float

    @classmethod
    def exact(cls, value: float) -> Interval:
        """Return the interval of a value that is known."""
        return cls(value, value, value)

    def times(self, factor: float) -> Interval:
        """Return the interval of a positive multiple of the value."""
        return Interval(self.estimate * factor, self.low * factor, self.high * factor)

    def plus(self, value: float) -> Interval:
        """Return the interval of the value plus a known one."""
        return Interval(self.estimate + value, self.low + value, self.high + value)

    def within(self, least: float, most: float) -> Interval:
        """Return the interval if the value is known to be between `least` and `most`."""
        return Interval(*(min(max(value, least), most) for value in self))


def half_width_of_mean(values: Sequence[float], of: int) -> float:
    """Return half the width of the interval for the mean of `of` values, some of which were drawn at random.

    values  the values that were drawn, without replacement; if these are all, the mean is known

    The lengths of answers are skewed, so their mean is further off than a normal distribution says. The symmetric
    bootstrap-t interval allows for that. Returns infinity for a single value out of several.
    """
    numbers = np.asarray(values, np.float64)
    n = numbers.size
    if n >= of:
        return 0.0
    if n < 2:
        return math.inf
    error = float(numbers.std(ddof=1)) / math.sqrt(n)
    return _reach(numbers, error) * error * math.sqrt(1 - n / of) if error else 0.0


def _reach(numbers: np.ndarray[tuple[int], np.dtype[np.float64]], error: float) -> float:
    """Return the width of the interval in standard errors. It is never narrower than Student's t."""
    n = numbers.size
    normal = student_quantile(LEVEL, n - 1)
    if n < ENOUGH_ROUNDS:
        return normal
    drawn = numbers[np.random.default_rng(_SEED).integers(0, n, (_RESAMPLES, n))]
    errors = drawn.std(axis=1, ddof=1) / math.sqrt(n)
    distances = np.abs(drawn.mean(axis=1) - numbers.mean())
    # A resample that repeats a single value says nothing about the width.
    far = distances[errors > error * 1e-9] / errors[errors > error * 1e-9]
    rank = min(math.ceil(LEVEL * (far.size + 1)), far.size)
    return max(normal, float(np.partition(far, rank - 1)[rank - 1]))
