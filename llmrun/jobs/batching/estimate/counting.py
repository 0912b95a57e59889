"""Counts the calls and the prompt tokens of a batch without running it, and draws a sample of the calls.

The calls are read in this process, as the engine reads them. Tokens that are in the cache as the prefix of an earlier
prompt are not computed again, so they are counted separately.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress, count
from operator import ne
from pathlib import Path
from typing import Final

from llmrun.base.errors import LlmrunError
from llmrun.engine.answer import Answer
from llmrun.engine.engine import Engine
from llmrun.engine.requests import ModelFacts
from llmrun.jobs.batching.intake import Intake, ReadLine
from llmrun.jobs.batching.requests import Call, CallOptions
from llmrun.jobs.batching.work import prefix_of
from llmrun.jobs.batching.workers.local import parse_call


class PrefixCounter:
    """Counts the computed tokens of prompts that are given in the order in which a run computes them.

    A prompt reuses what it has in common with the one before it. In sorted order, this is as much as it has in common
    with any earlier prompt, so only one prompt has to be kept, however many there are.

    total   tokens of all prompts
    computed  how many of them are computed
    common  how many tokens are the same at the beginning of all prompts
    """

    def __init__(self) -> None:
        self.total = self.computed = self.common = 0
        self._last: Sequence[int] | None = None

    def add(self, tokens: Sequence[int]) -> None:
        """Count the next prompt. At least its last token is computed, because the answer begins with its logits."""
        if self._last is None:
            shared, self.common = 0, len(tokens)
        else:
            shared = common_prefix(self._last, tokens)
            self.common = min(self.common, shared)
        self.total += len(tokens)
        self.computed += len(tokens) - min(shared, max(len(tokens) - 1, 0))
        self._last = tokens


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens are the same at the beginning of both sequences."""
    return next(compress(count(), map(ne, one, other)), min(len(one), len(other)))


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


@dataclass(frozen=True, slots=True)
class CallReader:
    """Turns calls into tokens with the chat template and the tokenizer of an open model."""

    engine: Engine
    facts: ModelFacts

    def count(self, call: Call) -> CountedCall:
        """Read a call without running it. Raises the LlmrunError with which a run would answer it."""
        parsed = parse_call(call.url, call.body, self.facts)
        answers = [self.engine.prepare(request) for request in parsed.requests[:: parsed.n]]
        most = parsed.n * sum(answer.limit - answer.prompt_tokens for answer in answers)
        return CountedCall([answer.tokens for answer in answers], parsed.n, most)

    def prepare(self, call: Call) -> list[Answer]:
        """Return the answers of a call, ready to be queued. Raises the same errors."""
        parsed = parse_call(call.url, call.body, self.facts)
        return [self.engine.prepare(request) for request in parsed.requests]
