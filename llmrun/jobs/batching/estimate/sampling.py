"""Answers some calls of a batch, as a run would, and derives the speeds of the run and the length of all answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from llmrun.base.machine.energy import EnergyMeter
from llmrun.engine.answer import Answer
from llmrun.engine.requests import Event, Failed, Finished, PrefillProgress
from llmrun.jobs.batching.estimate.counting import CallReader
from llmrun.jobs.batching.requests import Call
from llmrun.jobs.bench.intervals import LEVEL, Interval, half_width_of_mean
from llmrun.jobs.bench.statistics import MINIMUM_ROUNDS, typical

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


@dataclass(frozen=True, slots=True)
class CutAnswer:
    """An answer that was not finished when the measurement ended.

    generated  its tokens so far
    most       the most tokens that it can have
    """

    generated: int
    most: int


def generated_per_call(finished: Sequence[int], cut: Sequence[CutAnswer], calls: int) -> Interval:
    """Return the mean number of generated tokens of a batch's calls, some of which were answered.

    finished  the tokens of complete answers
    cut       the other answers of the sample. The low end takes them as complete, and the high end assumes that they
              reach their limit. The estimate assumes that an answer is as likely to end after any of its tokens
    calls     the number of calls in the batch
    Raises ValueError if there is no answer at all.
    """
    n = len(finished) + len(cut)
    if not n:
        raise ValueError("generated per call: no answers")
    least = [*finished, *(one.generated for one in cut)]
    most = [*finished, *(one.most for one in cut)]
    low, high = sum(least) / n, sum(most) / n
    estimate = sum(least) / len(finished) if finished else high
    return Interval(
        min(max(estimate, low), high),
        max(0.0, low - half_width_of_mean(least, calls)),
        high + half_width_of_mean(most, calls),
    )


BEGIN_S: Final = 20.0  # how long new calls begin
FINISH_S: Final = 100.0  # how long the begun ones may take to finish after that


@dataclass(frozen=True, slots=True)
class Sample:
    """The measurements of a sample.

    steps      all steps, in order
    steady     the steps with as many answers at a time as in a run
    finished   the generated tokens of the calls that were answered completely
    cut        the calls that took too long
    most_at_a_time  the most answers that had begun at a time
    source, joules  the counter of energy and what it counted during all steps, or None
    """

    steps: Sequence[Step]
    steady: slice
    finished: Sequence[int]
    cut: Sequence[CutAnswer]
    most_at_a_time: int
    source: str
    joules: float | None

    @property
    def seconds(self) -> float:
        """The seconds of all steps."""
        return sum(step.seconds for step in self.steps)

    @property
    def lengths(self) -> list[int]:
        """The generated tokens of all calls, so far."""
        return [*self.finished, *(one.generated for one in self.cut)]


@dataclass(frozen=True, slots=True)
class Limits:
    """How long to measure, in seconds: new calls begin until `begin_s`, and may finish until `finish_s` after that."""

    begin_s: float = BEGIN_S
    finish_s: float = FINISH_S


@dataclass(eq=False, slots=True)
class _RunningCall:
    answers: Sequence[Answer]

    @property
    def has_begun(self) -> bool:
        return any(answer.prefill_started is not None for answer in self.answers)

    @property
    def generated(self) -> int:
        return sum(answer.generated_tokens for answer in self.answers)

    @property
    def most(self) -> int:
        return sum(answer.limit - answer.prompt_tokens for answer in self.answers)


class Sampler:
    """Runs calls in the order in which they are given.

    A new call begins as soon as another one ends, until the time is up. All begun calls then finish. Otherwise, long
    answers would be missing, because they are the ones that are still running at any moment. For the same reason, the
    decision to begin a call never depends on its own length.
    """

    def __init__(
        self,
        reader: CallReader,
        calls: Sequence[Call],
        parallel: int,
        limits: Limits = Limits(),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._reader, self._engine = reader, reader.engine
        self._waiting = list(reversed(calls))
        self._parallel = parallel
        self._limits = limits
        self._clock = clock
        self._calls: list[_RunningCall] = []
        self._answers: dict[int, Answer] = {}  # unfinished ones, by their IDs
        self._computed: dict[int, int] = {}  # their prompt tokens in the cache, by their IDs
        self._steps: list[Step] = []
        self._finished: list[int] = []
        self._steady_from: int | None = None
        self._steady_until: int | None = None
        self._most_at_a_time = 0

    def run(self, meter: EnergyMeter, progress: Callable[[int, float], None]) -> Sample:
        """Measure, which takes `begin_s` or a few seconds longer, unless answers are long or the model is slow.

        progress  called with the number of finished calls and the seconds so far

        Raises the errors of `Engine.step`.
        """
        with meter.measure() as reading:
            self._run(progress)
        cut = [CutAnswer(call.generated, call.most) for call in self._calls]
        steady = slice(self._steady_from or 0, self._steady_until)
        return Sample(self._steps, steady, self._finished, cut, self._most_at_a_time, reading.source, reading.joules)

    def _run(self, progress: Callable[[int, float], None]) -> None:
        began = self._clock()
        while (passed := self._clock() - began) < self._limits.begin_s + self._limits.finish_s:
            self._begin_calls(passed < self._limits.begin_s)
            if self._engine.idle:
                return
            self._step()
            progress(len(self._finished), passed)

    def _begin_calls(self, may_begin: bool) -> None:
        if self._steady_until is not None:
            return
        if not may_begin:
            self._waiting.clear()
            for call in [call for call in self._calls if not call.has_begun]:
                self._calls.remove(call)
                for answer in call.answers:
                    self._engine.cancel(answer.request_id)
        while self._waiting and len(self._answers) < self._parallel:
            call = _RunningCall(self._reader.prepare(self._waiting.pop()))
            self._calls.append(call)
            for answer in call.answers:
                self._answers[self._engine.enqueue(answer)] = answer
        if not self._waiting:
            self._steady_until = len(self._steps)

    def _step(self) -> None:
        answers = self._answers.values()
        answering = sum(answer.generated_tokens > 0 for answer in answers)
        before = sum(answer.generated_tokens for answer in answers)
        started = self._clock()
        events = self._engine.step()
        seconds = self._clock() - started
        generated = sum(answer.generated_tokens for answer in answers) - before
        begun = sum(answer.prefill_started is not None for answer in answers)
        self._most_at_a_time = max(self._most_at_a_time, begun)
        if self._steady_from is None and begun >= self._parallel:
            self._steady_from = len(self._steps)
        self._steps.append(Step(seconds, sum(map(self._computed_rows, events)), answering, generated))
        for event in events:
            if isinstance(event, Finished | Failed):
                self._answers.pop(event.request_id)
                self._computed.pop(event.request_id, None)
        for call in [call for call in self._calls if all(answer.over for answer in call.answers)]:
            self._calls.remove(call)
            self._finished.append(call.generated)

    def _computed_rows(self, event: Event) -> int:
        """Return the prompt tokens that a step has computed, according to one of its events."""
        if not isinstance(event, PrefillProgress):
            return 0
        before = self._computed.get(event.request_id, self._answers[event.request_id].cached_tokens or 0)
        self._computed[event.request_id] = event.done
        return event.done - before
