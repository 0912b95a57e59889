"""Pure functions that decide when warm-up is over and when there are enough measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from llmrun.jobs.bench.analysis import statistics

WINDOW = 4  # Warm-up is over when this many recent warm-ups are stable.
MAXIMUM_WARMUPS = 12  # After this many warm-ups, measuring starts even on an unstable machine.

_TOLERANCE = 0.02  # A relative trend smaller than this counts as stable, even if there is no scatter.

# The maximum relative width of a comparison's confidence interval: its upper end divided by its lower end, minus 1.
# With 0.06, a true difference of 5 % was detected in both prefill and decode, in all of 160 replayed recordings and 100
# synthetic runs. With 0.07, it was detected in 91 to 96 % of the runs, and with 0.08 in 85 to 86 %.
_PRECISION = 0.06
# The maximum relative width of the 95 % interval of a configuration that is not compared with another. This limit is
# larger than the one above, because this interval also includes the machine's drift: 38 of 40 recorded series reached
# 0.10 (after 8 to 182 rounds), but only 18 reached 0.06.
_PRECISION_ALONE = 0.10


def is_stable(values: Sequence[float]) -> bool:
    """Return whether warm-up is over.

    Warm-up is over when the trend of the last WINDOW warm-ups is within their scatter, or after MAXIMUM_WARMUPS.
    `values` contains one time or one speed per warm-up. Raises ValueError if a value is not positive and finite.
    """
    numbers = np.asarray(values, np.float64)
    if not (np.isfinite(numbers) & (numbers > 0)).all():
        raise ValueError("warm-up: a value is not above 0 and finite")
    if numbers.size >= MAXIMUM_WARMUPS:
        return True
    if numbers.size < WINDOW:
        return False
    last = np.log(numbers[-WINDOW:])
    later, earlier = np.triu_indices(WINDOW, 1)[::-1]
    # Use the median of all slopes (Theil-Sen), so that a single disturbed warm-up neither causes nor hides a trend.
    slope = np.median((last[later] - last[earlier]) / (later - earlier))
    rest = last - slope * np.arange(WINDOW)
    scatter = np.abs(rest - np.median(rest)).mean()
    return bool(abs(slope) * (WINDOW - 1) <= _TOLERANCE + 2 * scatter)


def are_narrow(
    samples: Sequence[Mapping[str, Sequence[float]]], pairs: Sequence[tuple[int, int]], metrics: Sequence[str]
) -> bool:
    """Return whether the intervals are narrow enough to stop measuring. Call this function after every round.

    The decision depends only on the widths of the intervals, never on the measured values.

    samples  for each configuration, the values of each metric, one per round (Result.samples)
    pairs    the index pairs of configurations that are compared; if empty, each configuration's own interval counts
    metrics  the metrics that the verdicts compare
    """
    rounds = min(len(one[metric]) for one in samples for metric in metrics)
    # After an odd number of rounds, the last round has no counterpart in the reverse order yet.
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
