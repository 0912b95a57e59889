"""Derives the speeds of a run from the steps of a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from llmrun.jobs.bench.analysis.intervals import LEVEL, Interval
from llmrun.jobs.bench.analysis.statistics import MINIMUM_ROUNDS, typical

_PARTS: Final = 20  # the sample is divided into as many parts, whose speeds are compared


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine.

    prompt_rows  prompt tokens that it computed
    answering    answers that already had tokens before the step, each of which got at least one more
    generated    tokens that all answers got
    """

    seconds: float
    prompt_rows: int
    answering: int
    generated: int


@dataclass(frozen=True, slots=True)
class Speeds:
    """The seconds that tokens and steps take on this machine.

    prompt_s     seconds for a computed prompt token
    generated_s  seconds for a generated token, with as many answers at a time as in the run
    step_s       seconds for a step without prompts, apart from those for each answer in it
    tokens_per_step  tokens that an answer gets in a step
    drift        the factor by which the mean speed may differ from this, (1, 1, 1) if there are too few steps to tell
    """

    prompt_s: float
    generated_s: float
    step_s: float
    tokens_per_step: float
    drift: Interval

    def seconds(self, computed: float, generated: float) -> float:
        """Return the seconds for these numbers of computed prompt tokens and generated tokens."""
        return self.prompt_s * computed + self.generated_s * generated


def speeds_of(steps: Sequence[Step], steady: slice) -> Speeds:
    """Return the speeds of a sample.

    steady  the steps with as many answers at a time as in the run. If they generate nothing, all steps are used
    Raises ValueError if there are no steps.

    The time of a step is that of its answers, as in steps without prompts, plus a part for each row of a prompt.
    """
    if not steps:
        raise ValueError("speeds: no steps")
    base, each = _step_costs([step for step in steps if not step.prompt_rows and step.answering])
    rows = sum(step.prompt_rows for step in steps)
    beside = sum(
        step.seconds - (base + each * step.answering if step.answering else 0) for step in steps if step.prompt_rows
    )
    prompt_s = max(0.0, beside / rows) if rows else 0.0
    full = steps[steady]
    if not any(step.generated for step in full):
        full = steps
    generated = sum(step.generated for step in full)
    answering_s = sum(step.seconds - prompt_s * step.prompt_rows for step in full)
    generated_s = max(0.0, answering_s / generated) if generated else 0.0
    parts = sum(step.answering for step in steps if not step.prompt_rows)
    drawn = sum(step.generated for step in steps if not step.prompt_rows)
    per_step = drawn / parts if parts else 1.0
    return Speeds(prompt_s, generated_s, base, per_step, _drift(full, prompt_s, generated_s))


def _step_costs(steps: Sequence[Step]) -> tuple[float, float]:
    """Return the seconds of a step without prompts, and those that each of its answers adds; neither is negative."""
    if not steps:
        return 0.0, 0.0
    answering = np.array([step.answering for step in steps], np.float64)
    seconds = np.array([step.seconds for step in steps], np.float64)
    apart = answering - answering.mean()
    each = float(apart @ seconds / (apart @ apart)) if apart.any() else 0.0
    each = min(max(each, 0.0), float(answering @ seconds / (answering @ answering)))
    return max(0.0, float(seconds.mean() - each * answering.mean())), each


def _drift(steps: Sequence[Step], prompt_s: float, generated_s: float) -> Interval:
    """Return how far the mean speed may be off, from the ratios of measured and predicted seconds in parts of a run."""
    part_s = sum(step.seconds for step in steps) / _PARTS
    ratios, seconds, predicted = [], 0.0, 0.0
    for step in steps:
        seconds += step.seconds
        predicted += prompt_s * step.prompt_rows + generated_s * step.generated
        if seconds >= part_s and predicted > 0:
            ratios.append(seconds / predicted)
            seconds = predicted = 0.0
    if len(ratios) < MINIMUM_ROUNDS:
        return Interval.exact(1.0)
    found = typical(ratios, level=LEVEL)
    # If neighboring parts are alike, the interval is wide, but the mean is between the slowest and the fastest part.
    low = max(found.low / found.ratio, min(1.0, *ratios))
    return Interval(1.0, low, min(found.high / found.ratio, max(1.0, *ratios)))
