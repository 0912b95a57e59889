"""Answers some calls of a batch, as a run would, to measure how long answers are and how fast they are generated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from llmrun.base.machine.energy import EnergyMeter
from llmrun.engine.answer import Answer
from llmrun.engine.requests import Event, Failed, Finished, PrefillProgress
from llmrun.jobs.batching.estimate.answers import CutAnswer
from llmrun.jobs.batching.estimate.reading import CallReader
from llmrun.jobs.batching.estimate.speeds import Step
from llmrun.jobs.batching.requests import Call

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
        return Sample(*(self._steps, steady, self._finished, cut, self._most_at_a_time), reading.source, reading.joules)

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
