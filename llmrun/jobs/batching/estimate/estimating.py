"""Predicts the time, the energy and the price of a batch from its token counts and from the speeds of a sample."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from llmrun.base.errors import LlmrunError
from llmrun.jobs.batching.estimate.counting import Counts
from llmrun.jobs.batching.estimate.sampling import Sample, Speeds, generated_per_call, speeds_of
from llmrun.jobs.bench.intervals import Interval

_REPEATED: Final = 10  # simulated ends of a run, of which the mean is used
_WAVES: Final = 8  # answers in a simulation, as multiples of those that run at a time
_SEED: Final = 1
_MILLION: Final = 1e6


@dataclass(frozen=True, slots=True)
class Workload:
    """The amount of work in a batch.

    calls      calls to answer
    parallel   the most answers that a machine generates at a time
    computed   prompt tokens that are not reused from the cache
    common     tokens at the beginning of all prompts, which every machine computes once
    generated  tokens of all answers
    lengths    tokens of the answers in the sample
    """

    calls: int
    parallel: int
    computed: int
    common: int
    generated: Interval
    lengths: Sequence[int]


def run_seconds(work: Workload, speeds: Speeds, load_s: float, machines: int = 1) -> Interval:
    """Return the seconds that a run takes on machines like this one, among which the calls are divided evenly.

    load_s  seconds to open the model, which all machines do at the same time

    The calls cannot be divided among more machines than there are calls, and at the end, some machines wait for the
    longest answers.
    """
    machines = min(machines, max(1, work.calls))
    computed = work.computed + (machines - 1) * work.common
    whole = speeds.seconds(computed, work.generated.estimate) / machines
    by_length = [(end - work.generated.estimate) * speeds.generated_s / machines for end in work.generated[1:]]
    by_drift = [(end - 1) * whole for end in speeds.drift[1:]]
    low, high = (math.hypot(*both) for both in zip(by_length, by_drift, strict=True))
    alone = _ending_s(work, speeds, work.calls) / machines
    ending = max(alone, _ending_s(work, speeds, math.ceil(work.calls / machines)))
    return Interval(whole, max(0.0, whole - low), whole + high).plus(load_s + ending)


def _ending_s(work: Workload, speeds: Speeds, calls: int) -> float:
    """Return the seconds by which a run takes longer because the last answers have no others beside them.

    A step takes c0 + c1 n seconds for n answers, so in total, c1 applies to all tokens however they are divided into
    steps. Only c0 applies to additional steps. Their number is found by simulating runs with answers like those of the
    sample.
    """
    drawn = random.Random(_SEED)
    more = 0.0
    for _ in range(_REPEATED):
        lengths = drawn.choices(work.lengths, k=min(calls, _WAVES * work.parallel))
        more += _steps(lengths, work.parallel) - sum(lengths) / work.parallel
    return max(0.0, speeds.step_s * more / _REPEATED / speeds.tokens_per_step)


def _steps(lengths: Sequence[int], parallel: int) -> int:
    """Return the number of steps in which answers of these lengths are generated, each as soon as there is room."""
    ends = [0] * parallel
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


@dataclass(frozen=True, slots=True)
class ApiPrice:
    """An API's prices for a million prompt tokens and a million generated tokens, in any currency."""

    prompt: float
    generated: float

    def of(self, prompt_tokens: int, generated: Interval) -> Interval:
        """Return the price of a batch."""
        return generated.times(self.generated / _MILLION).plus(self.of_prompts(prompt_tokens))

    def of_prompts(self, tokens: int) -> float:
        """Return the price of prompt tokens."""
        return tokens * self.prompt / _MILLION


@dataclass(frozen=True, slots=True)
class Estimate:
    """The predicted tokens, time and energy of a batch on machines like this one.

    counts    what was counted
    sample    what was measured
    speeds    the speeds of the sample
    mean      the mean number of generated tokens of a call, as far as the sample tells
    parallel  the most answers that a machine generates at a time
    load_s    seconds to open the model
    """

    counts: Counts
    sample: Sample
    speeds: Speeds
    mean: Interval
    parallel: int
    load_s: float

    @property
    def generated(self) -> Interval:
        """The tokens of all answers."""
        done = sum(self.sample.lengths)
        return self.mean.times(self.counts.calls).within(done, max(done, self.counts.most_generated))

    @property
    def per_call(self) -> Interval:
        """The mean number of generated tokens of a call, which cannot exceed the limits of the answers."""
        return self.generated.times(1 / self.counts.calls)

    @property
    def generated_for_lines(self) -> Interval:
        """The tokens of the answers if equal lines were answered separately, as APIs do."""
        return self.generated.times(self.counts.answered / self.counts.calls)

    @property
    def is_complete(self) -> bool:
        """Whether the sample has all calls."""
        return len(self.sample.finished) == self.counts.calls

    def seconds(self, machines: int = 1) -> Interval:
        """Return the seconds of a run, including the time to open the model."""
        if machines == 1 and self.is_complete:
            reused = sum(step.prompt_rows for step in self.sample.steps) - self.counts.prefixes.computed
            measured = max(0.0, self.sample.seconds - self.speeds.prompt_s * reused)
            return self.speeds.drift.times(measured).plus(self.load_s)
        prefixes = self.counts.prefixes
        work = Workload(
            self.counts.calls, self.parallel, prefixes.computed, prefixes.common, self.generated, self.sample.lengths
        )
        return run_seconds(work, self.speeds, self.load_s, machines)

    @property
    def watts(self) -> float | None:
        """The mean power during the sample, or None if this machine does not count energy."""
        joules, seconds = self.sample.joules, self.sample.seconds
        return None if joules is None or seconds <= 0 else joules / seconds


def estimate_of(counts: Counts, sample: Sample, parallel: int, load_s: float) -> Estimate:
    """Return the estimate that follows from a sample.

    parallel  the most answers that a machine generates at a time
    load_s    seconds to open the model

    Raises LlmrunError if the model was too slow to generate a single token.
    """
    if not sum(sample.lengths):
        seconds = f"{sample.seconds:.0f} s"
        raise LlmrunError(f"no token was generated within {seconds}, so the time cannot be predicted")
    mean = generated_per_call(sample.finished, sample.cut, counts.calls)
    return Estimate(counts, sample, speeds_of(sample.steps, sample.steady), mean, parallel, load_s)
