"""Estimates what a batch takes: counts its tokens, answers a sample of its calls, and predicts the rest."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.base.errors import LlmrunError
from llmrun.jobs.batching.estimate.answers import generated_per_call
from llmrun.jobs.batching.estimate.counting import Counts
from llmrun.jobs.batching.estimate.prediction import Workload, run_seconds
from llmrun.jobs.batching.estimate.sampling import Sample
from llmrun.jobs.batching.estimate.speeds import Speeds, speeds_of
from llmrun.jobs.bench.analysis.intervals import Interval


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
