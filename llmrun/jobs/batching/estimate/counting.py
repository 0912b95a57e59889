"""Reads a whole batch without running it: counts its calls and its prompt tokens, and draws a sample of the calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from llmrun.base.errors import LlmrunError
from llmrun.jobs.batching.estimate.prefixes import PrefixCounter
from llmrun.jobs.batching.intake import Intake, ReadLine
from llmrun.jobs.batching.ordering import prefix_of
from llmrun.jobs.batching.requests import Call, CallOptions

_SAMPLED: Final = 512  # calls; their interval is narrow enough, and their bodies fit in memory
_SEED: Final = 1
_SHOWN: Final = 100  # calls after which the progress is shown


@dataclass(frozen=True, slots=True)
class CountedCall:
    """A call as the engine reads it.

    prompts  the tokens of each prompt. All but few calls have one
    choices  answers to each prompt
    most     the most tokens that all answers together can have
    """

    prompts: Sequence[Sequence[int]]
    choices: int
    most: int

    @property
    def prompt_tokens(self) -> int:
        """The prompt tokens in the call's usage, where a prompt counts once however many answers it gets."""
        return sum(map(len, self.prompts))


@dataclass(slots=True)
class Counts:
    """The counts of a batch.

    lines          lines that are not blank
    failing        lines that cannot be answered
    first_problem  the number of the first of them, and what is wrong with it
    calls          calls to answer: lines that can be answered, without those that are equal to others
    prompt_tokens  of these calls, as in their usage
    billed_tokens  prompt tokens of all lines that can be answered, including equal ones
    most_generated the most tokens that all answers can have
    prefixes       prompts in the order of the run
    sample         some calls, in random order; each call is as likely to be among them as any other
    """

    lines: int = 0
    failing: int = 0
    first_problem: tuple[int, str] | None = None
    calls: int = 0
    prompt_tokens: int = 0
    billed_tokens: int = 0
    most_generated: int = 0
    prefixes: PrefixCounter = field(default_factory=PrefixCounter)
    sample: list[Call] = field(default_factory=list)

    @property
    def answered(self) -> int:
        """Lines that can be answered."""
        return self.lines - self.failing


def count_batch(
    source: Path, options: CallOptions, read: Callable[[Call], CountedCall], progress: Callable[[Counts], None]
) -> Counts:
    """Count a batch, in the windows and in the order in which a run reads and answers it.

    read      reads a call as the engine does. An LlmrunError means that the run would answer with an error
    progress  called now and then
    Raises UsageError if the input cannot be read.
    """
    counting = _Counting(read, progress)
    intake = Intake(source, options)
    while window := intake.next_window():
        counting.add(window)
    counting.drawn.shuffle(counting.counts.sample)
    return counting.counts


class _Counting:
    """The counts so far, and the calls that were already counted."""

    def __init__(self, read: Callable[[Call], CountedCall], progress: Callable[[Counts], None]) -> None:
        self._read = read
        self._progress = progress
        self._tokens: dict[bytes, int | None] = {}  # by the key of a call, its prompt tokens, or None if it fails
        self.counts = Counts()
        self.drawn = random.Random(_SEED)

    def add(self, window: Sequence[ReadLine]) -> None:
        """Count the lines of a window."""
        calls = {line.call.key: line.call for line in window if line.call is not None}
        problems = self._add_calls(call for key, call in calls.items() if key not in self._tokens)
        for line in window:
            self.counts.lines += 1
            tokens = None if line.call is None else self._tokens[line.call.key]
            if tokens is not None:
                self.counts.billed_tokens += tokens
                continue
            self.counts.failing += 1
            if self.counts.first_problem is None:
                words = str(line.problem) if line.call is None else problems[line.call.key]
                self.counts.first_problem = (line.id.number, words)

    def _add_calls(self, calls: Iterable[Call]) -> dict[bytes, str]:
        """Count new calls, and return what is wrong with some of them, by their keys."""
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
        counts.most_generated += counted.most
        for prompt in counted.prompts:
            for _ in range(counted.choices):
                counts.prefixes.add(prompt)
        if len(counts.sample) < _SAMPLED:
            counts.sample.append(call)
        elif (place := self.drawn.randrange(counts.calls)) < _SAMPLED:  # reservoir sampling
            counts.sample[place] = call
