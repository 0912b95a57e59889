"""Simulated answers for tests of the pace: steps with scripted durations, and drafts with scripted acceptance."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmrun.engine.costs import StepCosts, StepSize
from llmrun.engine.drafting.base import LONGEST_DRAFT, Draft, Kind
from llmrun.engine.drafting.pace import Acceptance, AnswerPace, Rates, StepPlan

Duration = Callable[[StepSize], float]  # seconds of a step


def size_with_draft(size: StepSize, rows: int, depth: int) -> StepSize:
    """Return the size after `rows` draft tokens are added to an answer with `depth` tokens in the cache."""
    return StepSize(size.answers, size.rows + rows, size.cached, size.attended + rows * depth)


def by_rows(points: dict[int, float], per_position: float = 0.0, per_attended: float = 0.0) -> Duration:
    """Return the durations of a machine where a step of n rows takes points[n], interpolated between the points."""
    known = sorted(points)

    def duration(size: StepSize) -> float:
        above = next((n for n in known if n >= size.rows), known[-1])
        below = max((n for n in known if n <= size.rows), default=known[0])
        share = (size.rows - below) / (above - below) if above > below else 0.0
        rows = points[below] + share * (points[above] - points[below])
        return rows + per_position * size.cached + per_attended * size.attended

    return duration


# Seconds per step over those of one row, measured with 2 threads, 1.24B parameters and Q4_0: kernels of AVX-512 that
# unpack a group of weights once for 8 rows, kernels of AVX2 for 4 rows, kernels of AVX2 that unpack it for each row,
# and llama.cpp, where a row costs almost as much as a step. "deep" is made up: attention takes a third of a step.
MACHINES = {
    "avx512": by_rows({1: 1.0, 2: 1.12, 4: 1.37, 8: 1.33, 16: 2.35}),
    "avx2": by_rows({1: 1.0, 2: 1.14, 4: 1.43, 8: 2.87, 16: 5.67}),
    "deep": by_rows({1: 1.0, 2: 1.1, 4: 1.3, 8: 1.6, 16: 2.5}, per_position=4e-4, per_attended=1e-4),
    "no gain": by_rows({1: 1.0, 2: 1.91, 4: 3.04, 8: 5.97, 16: 8.2}),
}


@dataclass(frozen=True)
class Phase:
    """A part of an answer in which drafts are right at a constant rate.

    tokens   the length of the part
    rate     the probability that a draft token is right if all before it are
    kind     the kind of the draft tokens
    offered  the share of steps for which there is a draft
    """

    tokens: int
    rate: float
    kind: Kind
    offered: float = 1.0


class Simulation:
    """An engine that runs one answer after the other, without a model and without a clock."""

    def __init__(self, duration: Duration, assumed: Rates, *, noise: float = 0.0, seed: int = 0) -> None:
        self.costs = StepCosts()
        self._acceptance = Acceptance(assumed)
        self._duration = duration
        self._noise = noise
        self._random = random.Random(seed)

    def run(self, phases: Sequence[Phase], prompt: int = 200) -> float:
        """Run one answer with the draft lengths that the pace chooses. Returns its seconds."""
        pace = AnswerPace(self._acceptance.rate)
        depth, seconds = prompt, 0.0
        for phase in phases:
            end = depth + phase.tokens
            while depth < end:
                size = StepSize(1, 1, depth, depth)
                found, n_run, plan = Draft(), 0, None
                if self.costs.known:
                    plan = StepPlan(self.costs, size)
                    kinds = (phase.kind,) * (LONGEST_DRAFT if self._random.random() < phase.offered else 0)
                    found = Draft((0,) * len(kinds), kinds)
                    n_run, _ = plan.best_length(kinds, pace, depth)
                taken = self._run_step(size, n_run, depth)
                seconds += taken
                compared = min(n_run + 1, len(found.tokens))
                n_right = self._n_right(phase.rate, compared)
                n_accepted = min(n_right, n_run) + 1
                pace.observe_tokens(n_accepted, min(n_right, n_run), max(n_right - n_run, 0))
                if plan is not None and n_run:
                    pace.observe_loss(plan.loss(found.first(n_run), 1.0, taken))
                for acceptance in (self._acceptance, pace.acceptance):
                    acceptance.observe(found, n_right, found_wrong=n_right < compared)
                depth += n_accepted
        return seconds

    def run_constant(self, phases: Sequence[Phase], length: int, prompt: int = 200) -> float:
        """Run one answer with drafts of a constant length. Returns its seconds."""
        depth, seconds = prompt, 0.0
        for phase in phases:
            end = depth + phase.tokens
            while depth < end:
                drafted = length if self._random.random() < phase.offered else 0
                seconds += self._duration(size_with_draft(StepSize(1, 1, depth, depth), drafted, depth))
                depth += self._n_right(phase.rate, drafted) + 1
        return seconds

    def _run_step(self, size: StepSize, drafted: int, depth: int) -> float:
        size = size_with_draft(size, drafted, depth)
        seconds = self._duration(size) * (1 + self._noise * self._random.expovariate(1.0))
        self.costs.observe(size, 0, seconds)
        return seconds

    def _n_right(self, rate: float, drafted: int) -> int:
        n = 0
        while n < drafted and self._random.random() < rate:
            n += 1
        return n
