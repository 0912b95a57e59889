"""When to begin to count and when to end: pure functions over the numbers measured so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from llmrun.bench.analysis import statistics

WINDOW = 4  # of the last warm-ups, which must be steady
MAXIMUM_WARMUPS = 12  # a machine that is never steady is measured as it is

_TOLERANCE = 0.02  # a change that needs no spread to be excused

# Of an interval: its upper end over its lower, less 1. Both metrics of a run said that 5 % is a difference in all of
# 160 replays of the recordings and all of 100 made runs at 0.06, in 91 to 96 % of them at 0.07, in 85 to 86 % at 0.08.
_PRECISION = 0.06
# Of the 95 % interval of a configuration that is compared with none. It carries the machine's drift: 38 of 40 recorded
# series got to 0.10 (in 8 to 182 rounds), 18 to 0.06.
_PRECISION_ALONE = 0.10


def is_stable(values: Sequence[float]) -> bool:
    """The last WINDOW warm-ups rise or fall no more than they scatter; or there were MAXIMUM_WARMUPS.

    `values`: one number a warm-up, a time or a speed. ValueError: one that is not above 0 and finite.
    """
    numbers = np.asarray(values, np.float64)
    if not (np.isfinite(numbers) & (numbers > 0)).all():
        raise ValueError("warm-up: a value is above 0 and finite")
    if numbers.size >= MAXIMUM_WARMUPS:
        return True
    if numbers.size < WINDOW:
        return False
    last = np.log(numbers[-WINDOW:])
    later, earlier = np.triu_indices(WINDOW, 1)[::-1]
    # The median of all slopes: one turn that another program disturbed neither makes a trend nor hides one.
    slope = np.median((last[later] - last[earlier]) / (later - earlier))
    rest = last - slope * np.arange(WINDOW)
    scatter = np.abs(rest - np.median(rest)).mean()
    return bool(abs(slope) * (WINDOW - 1) <= _TOLERANCE + 2 * scatter)


def are_narrow(
    samples: Sequence[Mapping[str, Sequence[float]]], pairs: Sequence[tuple[int, int]], metrics: Sequence[str]
) -> bool:
    """Asked after every round; looks at how wide the intervals are, never at what they say.

    samples  of each configuration, by metric, one number a round (Result.samples)
    pairs    the configurations that are compared, by index; none: each is judged by the interval of its own
    metrics  those that verdicts are made of
    """
    rounds = min(len(one[metric]) for one in samples for metric in metrics)
    # An odd round has not had its other order yet.
    if rounds < statistics.ENOUGH_ROUNDS or rounds % 2:
        return False
    level = statistics.verdict_level(max(1, len(pairs)) * len(metrics))
    for metric in metrics:
        compared = (
            statistics.paired_ratio(samples[of][metric], samples[against][metric], is_speed=True, level=level)
            for of, against in pairs
        )
        alone = () if pairs else (statistics.typical(one[metric]) for one in samples)
        if not all(statistics.is_narrow(interval, _PRECISION) for interval in compared):
            return False
        if not all(statistics.is_narrow(interval, _PRECISION_ALONE) for interval in alone):
            return False
    return True
