"""Summarizes the scores of chunks: perplexity, KL divergence and agreement, each with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmrun.jobs.bench.analysis.intervals import Interval, mean_of_series, proportion

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.jobs.evaluation.scores import Scores

PERCENTILES = (50.0, 90.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The perplexity of a model.

    value        e to the power of the mean surprise, with its interval of 95 %
    token_error  the standard error that llama-perplexity prints after "+/-". It assumes that the surprises of
                 neighbouring tokens are independent, and covers the true value in 68 % of cases if they are
    """

    value: Interval
    token_error: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing a model with its base.

    divergence   the mean of KL(base || model) in nats
    percentiles  of the divergence, for each of PERCENTILES
    maximum      the largest divergence
    same_top     the proportion of positions at which both models have the same most likely token
    ratio        the perplexity of the model divided by that of the base, computed from the same tokens
    """

    divergence: Interval
    percentiles: tuple[float, ...]
    maximum: float
    same_top: Interval
    ratio: Interval


@dataclass(frozen=True, slots=True)
class TextResult:
    """The result for a text. `base` and `comparison` are None if the model was not compared with another."""

    chunks: int
    scored: int
    model: Perplexity
    base: Perplexity | None
    comparison: Comparison | None


def summarized(chunks: Sequence[Scores]) -> TextResult:
    """Summarize the scores of at least one chunk. All chunks must have the same number of scored tokens.

    The intervals are computed from the means of chunks, because errors within a chunk are correlated. With a single
    chunk, they are infinite.
    """
    surprise = np.array([chunk.surprise for chunk in chunks])
    model = _perplexity(surprise)
    if not chunks[0].base.size:
        return TextResult(len(chunks), surprise.size, model, None, None)
    base = np.array([chunk.base for chunk in chunks])
    divergence = np.array([chunk.divergence for chunk in chunks])
    agrees = np.array([chunk.agrees for chunk in chunks])
    comparison = Comparison(
        divergence=mean_of_series(divergence.mean(axis=1)).within(0, math.inf),
        percentiles=tuple(np.percentile(divergence, PERCENTILES).tolist()),
        maximum=float(divergence.max()),
        same_top=proportion(agrees.sum(axis=1).tolist(), agrees.shape[1]),
        ratio=mean_of_series((surprise - base).mean(axis=1)).exponential(),
    )
    return TextResult(len(chunks), surprise.size, model, _perplexity(base), comparison)


def _perplexity(surprise: NDArray[np.float64]) -> Perplexity:
    """Return the perplexity from the surprise of each scored token, float64[chunks, scored]."""
    value = mean_of_series(surprise.mean(axis=1)).exponential()
    error = float(surprise.std() / math.sqrt(max(1, surprise.size - 1)))
    return Perplexity(value, value.estimate * error)
