"""Turns the hidden states of a text into its vector or its score."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.base.errors import ModelFileError, UsageError
from llmrun.base.types import Pooling, named_pooling

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.base.types import ModelInfo


def pooling_of(info: ModelInfo) -> Pooling:
    """Return the pooling that the model was trained with.

    Files that do not name one get the usual one: the last token with a causal mask, and the mean without.
    """
    named = named_pooling(info.metadata, info.architecture)
    return named or (Pooling.LAST if info.has_logits else Pooling.MEAN)


def first_wanted(pooling: Pooling, tokens: int, *, is_causal: bool) -> slice:
    """Return the positions whose hidden states a text of this many tokens needs."""
    match pooling:
        case Pooling.MEAN:
            return slice(0, tokens)
        case Pooling.LAST:
            return slice(tokens - 1, tokens)
        case Pooling.RANK if is_causal:
            return slice(tokens - 1, tokens)
    return slice(0, 1)


def pooled(hidden: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the mean of the hidden states float32[wanted positions, features] of a text."""
    mean: NDArray[np.float32] = hidden.mean(0, dtype=np.float64).astype(np.float32)
    return mean


def check_finite(vector: NDArray[np.float32], number: int) -> None:
    """Raise ModelFileError if a value of the vector of input `number` is NaN or infinite."""
    if not np.isfinite(vector).all():
        raise ModelFileError(
            f"invalid model output: the vector of input {number} has values that are not finite",
            hint="check the model file with llmrun verify, or try another backend",
        )


def cut_to(vector: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """Return the first `dimensions` features of a vector, or all. Raises UsageError if it has fewer.

    Models trained for this (Matryoshka) have the most important features first.
    """
    if dimensions is None:
        return vector
    if not 1 <= dimensions <= len(vector):
        raise UsageError(f"dimensions: must be 1 to {len(vector)}, the size of this model's vectors, not {dimensions}")
    return vector[:dimensions]


def normalized(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a vector of length 1 in the same direction, or zeros if it has no direction."""
    length = np.sqrt(np.square(vector, dtype=np.float64).sum())
    unit: NDArray[np.float32] = (vector / length if length else vector).astype(np.float32)
    return unit


def score_of(labels: NDArray[np.float32]) -> float:
    """Return the score of a document from what the model says about its labels.

    With one label, that is its value, which is a logit. With several, it is the probability of the first one, such as
    "yes".
    """
    if len(labels) == 1:
        return float(labels[0])
    weights = np.exp(labels.astype(np.float64) - labels.max())
    return float(weights[0] / weights.sum())
