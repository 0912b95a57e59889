"""Predicts how many tokens all answers of a batch have, from a sample of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmrun.jobs.bench.analysis.intervals import Interval, half_width_of_mean


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
