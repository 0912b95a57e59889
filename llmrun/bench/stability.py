"""When to begin to count and when to end: pure functions over the numbers measured so far."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmrun.bench import statistics

WINDOW = 4  # of the last warm-ups, which must be steady
MAXIMUM_WARMUPS = 12  # a machine that is never steady is measured as it is

_TOLERANCE = 0.02  # a change that needs no spread to be excused


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


class Progress(enum.Enum):
    """Whether the turns go on, and why they do not."""

    GO_ON = "go on"
    PRECISE = "precise"
    OUT_OF_TIME = "out of time"


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop.

    seconds          however little is known by then
    precision        of the interval of every comparison: its upper end over its lower, less 1
    precision_alone  of the 95 % interval of a configuration that is compared with none
    minimum_rounds   of each configuration, however steady they look

    Both metrics of a run said that 5 % is a difference in all of 160 replays of the recordings and all of 100 made runs
    at 0.06, in 91 to 96 % of them at 0.07, in 85 to 86 % at 0.08. A figure alone carries the machine's drift: 38 of 40
    recorded series got to 0.10 (in 8 to 182 rounds), 18 to 0.06.
    """

    seconds: float
    precision: float = 0.06
    precision_alone: float = 0.10
    minimum_rounds: int = statistics.ENOUGH_ROUNDS


def progress(
    samples: Sequence[Mapping[str, Sequence[float]]],
    pairs: Sequence[tuple[int, int]],
    metrics: Sequence[str],
    elapsed: float,
    limits: Limits,
) -> Progress:
    """Asked after every round; looks at how wide the intervals are, never at what they say.

    samples  of each configuration, by metric, one number a round (Result.samples)
    pairs    the configurations that are compared, by index; none: each is judged by the interval of its own
    metrics  those that verdicts are made of
    elapsed  seconds since the first round
    """
    if elapsed >= limits.seconds:
        return Progress.OUT_OF_TIME
    rounds = min(len(one[metric]) for one in samples for metric in metrics)
    # An odd round has not had its other order yet.
    if rounds < limits.minimum_rounds or rounds % 2:
        return Progress.GO_ON
    level = statistics.verdict_level(max(1, len(pairs)) * len(metrics))
    precision = limits.precision if pairs else limits.precision_alone
    for metric in metrics:
        if pairs:
            found = [
                statistics.paired_ratio(samples[of][metric], samples[against][metric], is_speed=True, level=level)
                for of, against in pairs
            ]
        else:
            found = [statistics.typical(one[metric]) for one in samples]
        if not all(statistics.is_narrow(interval, precision) for interval in found):
            return Progress.GO_ON
    return Progress.PRECISE
