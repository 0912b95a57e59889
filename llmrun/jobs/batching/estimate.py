"""Estimates the tokens and the time of a batch, from an exact count of prompt tokens and a sample that measures speed.

This process reads the calls in the same way as the engine. Tokens that the cache already holds as the prefix of an
earlier prompt are not computed again, so they are counted separately.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from llmrun.base.errors import LlmrunError
from llmrun.engine.answer import Answer
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Event, Failed, Finished, ModelFacts, PrefillProgress
from llmrun.engine.slots import common_prefix
from llmrun.jobs.batching.intake import Intake, ReadLine
from llmrun.jobs.batching.requests import Call, CallOptions
from llmrun.jobs.batching.work import prefix_of
from llmrun.jobs.batching.workers.local import parse_call

_SAMPLED: Final = 512  # calls in the sample: enough for a precise mean length, but few enough to fit in memory
_SEED: Final = 1
_SHOWN: Final = 100  # Calls between two updates of the progress.
BEGIN_S: Final = 20.0  # seconds during which the sample may begin new calls
FINISH_S: Final = 100.0  # How long calls may take to finish after BEGIN_S.


class PrefixCounter:
    """Counts the computed tokens of prompts. The prompts must be added in the order of the run.

    A prompt reuses the prefix that it shares with the previous prompt. In sorted order, the previous prompt shares the
    longest prefix, so only one prompt must be kept in memory.

    total     the number of tokens of all prompts
    computed  the number of tokens that are not reused
    """

    def __init__(self) -> None:
        self.total = self.computed = 0
        self._last: list[int] = []

    def add(self, tokens: list[int]) -> None:
        """Count the next prompt. The last token is always computed, because the answer begins with its logits."""
        shared = common_prefix(self._last, tokens)
        self.total += len(tokens)
        self.computed += len(tokens) - min(shared, max(len(tokens) - 1, 0))
        self._last = tokens


@dataclass(frozen=True, slots=True)
class CountedCall:
    """A call in the form that the engine reads.

    prompts  the tokens of each prompt; nearly all calls have one prompt
    choices  the number of answers to each prompt
    """

    prompts: Sequence[list[int]]
    choices: int

    @property
    def prompt_tokens(self) -> int:
        """The call's prompt tokens, counting each prompt once, regardless of the number of answers."""
        return sum(map(len, self.prompts))


@dataclass(slots=True)
class Counts:
    """The counts of a batch.

    lines          lines that are not blank
    failing        lines that would be answered with an error
    first_problem  the number of the first failing line, and its problem
    calls          distinct calls that can be answered, where equal lines count once
    prompt_tokens  the prompt tokens of the distinct calls, as in their usage
    billed_tokens  the prompt tokens of all lines that can be answered, including equal lines
    prefixes       prompts in the order of the run
    sample         some calls in random order, where every call is equally likely to be included
    """

    lines: int = 0
    failing: int = 0
    first_problem: tuple[int, str] | None = None
    calls: int = 0
    prompt_tokens: int = 0
    billed_tokens: int = 0
    prefixes: PrefixCounter = field(default_factory=PrefixCounter)
    sample: list[Call] = field(default_factory=list)

    @property
    def answered(self) -> int:
        """The number of lines that can be answered."""
        return self.lines - self.failing


def count_batch(
    source: Path, options: CallOptions, read: Callable[[Call], CountedCall], progress: Callable[[Counts], None]
) -> Counts:
    """Count a batch in the same windows and in the same order as a run.

    read      reads a call as the engine does, and raises LlmrunError if the run would answer with an error
    progress  a function that is called now and then
    Raises UsageError if the input cannot be read, and for the first line that is not a request.
    """
    counting = _Counting(read, progress)
    intake = Intake(source, options)
    while window := intake.next_window():
        counting.add(window)
    counting.drawn.shuffle(counting.counts.sample)
    return counting.counts


class _Counting:
    """The counts so far, and the calls that are already counted."""

    def __init__(self, read: Callable[[Call], CountedCall], progress: Callable[[Counts], None]) -> None:
        self._read = read
        self._progress = progress
        self._tokens: dict[bytes, int | None] = {}  # maps each call's key to its prompt tokens, or None for an error
        self.counts = Counts()
        self.drawn = random.Random(_SEED)

    def add(self, window: Sequence[ReadLine]) -> None:
        """Count the lines of a window."""
        calls = {line.call.key: line.call for line in window}
        problems = self._add_calls(call for key, call in calls.items() if key not in self._tokens)
        for line in window:
            self.counts.lines += 1
            tokens = self._tokens[line.call.key]
            if tokens is not None:
                self.counts.billed_tokens += tokens
                continue
            self.counts.failing += 1
            if self.counts.first_problem is None:
                self.counts.first_problem = (line.id.number, problems[line.call.key])

    def _add_calls(self, calls: Iterable[Call]) -> dict[bytes, str]:
        """Count new calls, and return a mapping from the keys of failing calls to their problems."""
        problems: dict[bytes, str] = {}
        for number, call in enumerate(sorted(calls, key=prefix_of), 1):
            try:
                self._add_call(call, self._read(call))
            except LlmrunError as error:
                self._tokens[call.key] = None
                problems[call.key] = f"{error}; {error.hint}" if error.hint else str(error)
            if number % _SHOWN == 0:
                self._progress(self.counts)
        return problems

    def _add_call(self, call: Call, counted: CountedCall) -> None:
        counts = self.counts
        self._tokens[call.key] = counted.prompt_tokens
        counts.calls += 1
        counts.prompt_tokens += counted.prompt_tokens
        for prompt in counted.prompts:
            for _ in range(counted.choices):
                counts.prefixes.add(prompt)
        if len(counts.sample) < _SAMPLED:
            counts.sample.append(call)
        elif (place := self.drawn.randrange(counts.calls)) < _SAMPLED:  # reservoir sampling
            counts.sample[place] = call


@dataclass(frozen=True, slots=True)
class CallReader:
    """Converts calls to tokens with the chat template and the tokenizer of an open model."""

    engine: Engine
    facts: ModelFacts

    def count(self, call: Call) -> CountedCall:
        """Read a call without running the call. Raises the same LlmrunError that a run would report."""
        parsed = parse_call(call.url, call.whole_body(), self.facts)
        answers = [self.engine.prepare(request) for request in parsed.requests[:: parsed.n]]
        return CountedCall([answer.tokens for answer in answers], parsed.n)

    def prepare(self, call: Call) -> list[Answer]:
        """Return the answers of a call, ready to be queued. Raises the same errors as `count`."""
        parsed = parse_call(call.url, call.whole_body(), self.facts)
        return [self.engine.prepare(request) for request in parsed.requests]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine.

    prompt_rows  prompt tokens that the step computed
    answering    answers that already had tokens before the step
    generated    tokens that all answers received in the step
    """

    seconds: float
    prompt_rows: int
    answering: int
    generated: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The measurements of a sample.

    steps       all steps, in order
    parallel    the maximum number of answers that a run generates at a time
    at_a_time   the maximum number of answers of the sample that were in progress at a time
    finished    calls whose answers are complete
    unfinished  calls that took too long
    """

    steps: Sequence[Step]
    parallel: int
    at_a_time: int
    finished: int
    unfinished: int

    @property
    def seconds(self) -> float:
        """The total duration of all steps in seconds."""
        return sum(step.seconds for step in self.steps)

    @property
    def generated(self) -> int:
        """The number of tokens of all answers, including unfinished answers."""
        return sum(step.generated for step in self.steps)

    @property
    def seconds_per_generated_token(self) -> float:
        """The seconds per generated token, measured at the run's concurrency if the sample reached that concurrency."""
        steps = [step for step in self.steps if step.generated and not step.prompt_rows]
        steps = [step for step in steps if step.answering >= self.parallel] or steps or list(self.steps)
        generated = sum(step.generated for step in steps)
        return sum(step.seconds for step in steps) / generated if generated else 0.0

    @property
    def seconds_per_prompt_token(self) -> float:
        """The seconds that each computed prompt token adds to a step."""
        steps = [step for step in self.steps if step.prompt_rows]
        rows = sum(step.prompt_rows for step in steps)
        beside = sum(step.seconds - self.seconds_per_generated_token * step.generated for step in steps)
        return max(0.0, beside / rows) if rows else 0.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """The tokens, speed and time of a batch on this machine.

    load_s  the time to open the model in seconds
    """

    counts: Counts
    sample: Sample
    load_s: float

    @property
    def is_complete(self) -> bool:
        """True if the sample contains all calls."""
        return self.sample.finished == self.counts.calls

    @property
    def generated_per_call(self) -> float:
        """The mean number of generated tokens of the calls in the sample."""
        return self.sample.generated / (self.sample.finished + self.sample.unfinished)

    @property
    def seconds(self) -> float:
        """The predicted seconds for a run, including opening the model, if answers are as long as the sample's."""
        sample = self.sample
        if self.is_complete:
            return self.load_s + sample.seconds
        prompts = sample.seconds_per_prompt_token * self.counts.prefixes.computed
        answers = sample.seconds_per_generated_token * self.generated_per_call * self.counts.calls
        return self.load_s + prompts + answers


class Sampler:
    """Runs calls in the given order.

    A new call begins as soon as another call ends, until the time is up. Calls in progress at the deadline run to
    completion. Otherwise, long answers would be missing from the sample, because at any moment, the answers in progress
    tend to be long. To avoid bias, the decision to begin a call never depends on the length of that call.
    """

    def __init__(
        self,
        reader: CallReader,
        calls: Sequence[Call],
        parallel: int,
        *,
        begin_s: float = BEGIN_S,
        finish_s: float = FINISH_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepare the sample.

        begin_s   how long the sample may begin new calls
        finish_s  how long calls in progress may take to finish after `begin_s`
        """
        self._reader, self._engine = reader, reader.engine
        self._waiting = list(reversed(calls))
        self._parallel = parallel
        self._begin_s, self._finish_s = begin_s, finish_s
        self._clock = clock
        self._calls: list[list[Answer]] = []  # The answers of each unfinished call.
        self._answers: dict[int, Answer] = {}  # Unfinished answers, by their IDs.
        self._computed: dict[int, int] = {}  # Prompt tokens of unfinished answers in the cache, by the answers' IDs.
        self._steps: list[Step] = []
        self._finished = self._at_a_time = 0

    def run(self, progress: Callable[[int, float], None]) -> Sample:
        """Measure the sample for `begin_s`, or longer if answers are long or the model is slow.

        progress  called with the number of finished calls and the elapsed seconds

        Raises the errors of `Engine.step`, and LlmrunError if the model is too slow to generate a single token.
        """
        began = self._clock()
        while (passed := self._clock() - began) < self._begin_s + self._finish_s:
            if passed < self._begin_s:
                self._begin_calls()
            else:
                self._stop_beginning()
            if self._engine.idle:
                break
            self._step()
            progress(self._finished, passed)
        sample = Sample(self._steps, self._parallel, self._at_a_time, self._finished, len(self._calls))
        if not sample.generated:
            raise LlmrunError(f"no token was generated within {sample.seconds:.0f} s, so the speed is unknown")
        return sample

    def _begin_calls(self) -> None:
        while self._waiting and len(self._answers) < self._parallel:
            answers = self._reader.prepare(self._waiting.pop())
            self._calls.append(answers)
            for answer in answers:
                self._answers[self._engine.enqueue(answer)] = answer

    def _stop_beginning(self) -> None:
        self._waiting.clear()
        begun = [call for call in self._calls if any(answer.prefill_started is not None for answer in call)]
        for answer in [answer for call in self._calls if call not in begun for answer in call]:
            self._engine.cancel(answer.request_id)
        self._calls = begun

    def _step(self) -> None:
        answers = self._answers.values()
        answering = sum(answer.generated_tokens > 0 for answer in answers)
        before = sum(answer.generated_tokens for answer in answers)
        started = self._clock()
        events = self._engine.step()
        seconds = self._clock() - started
        generated = sum(answer.generated_tokens for answer in answers) - before
        self._at_a_time = max(self._at_a_time, sum(answer.prefill_started is not None for answer in answers))
        self._steps.append(Step(seconds, sum(map(self._computed_rows, events)), answering, generated))
        for event in events:
            if isinstance(event, Finished | Failed):
                self._answers.pop(event.request_id)
                self._computed.pop(event.request_id, None)
        unfinished = [call for call in self._calls if not all(answer.over for answer in call)]
        self._finished += len(self._calls) - len(unfinished)
        self._calls = unfinished

    def _computed_rows(self, event: Event) -> int:
        """Return the number of prompt tokens that a step has computed, according to one of the step's events."""
        if not isinstance(event, PrefillProgress):
            return 0
        before = self._computed.get(event.request_id, self._answers[event.request_id].cached_tokens or 0)
        self._computed[event.request_id] = event.done
        return event.done - before
