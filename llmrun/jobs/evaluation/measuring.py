"""Evaluates a model on chunks of a text, alone or side by side with a base model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.engine.drafting.vocabularies import difference_in_words
from llmrun.jobs.evaluation.forward import batch_of, logits_in_slices, rows_at_a_time
from llmrun.jobs.evaluation.scores import Scores, scores_of, scores_of_two

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.base import Backend
    from llmrun.jobs.evaluation.chunks import Chunk


def check_same_vocabulary(model: Backend, base: Backend) -> None:
    """Raise UsageError unless all tokens of both models are the same, because the divergence is a sum over them."""
    sizes = model.info.vocabulary_size, base.info.vocabulary_size
    words = difference_in_words(model, base)
    if not words and sizes[0] != sizes[1]:
        words = f"{model.info.path}: {sizes[0]:,} tokens, but {sizes[1]:,} in {base.info.path}"
    if words:
        raise UsageError(f"different vocabularies: {words}", hint="compare quantizations of the same model")


def scores_of_chunks(model: Backend, base: Backend | None, chunks: Sequence[Chunk]) -> Iterator[Scores]:
    """Yield the scores of each chunk. The models take turns after every 64 MB of logits.

    Raises the errors of `Backend.forward`, and LlmrunError if a model computes numbers that are not finite.
    """
    most = rows_at_a_time(model.info.vocabulary_size)
    backends = [model] if base is None else [model, base]
    for number, chunk in enumerate(chunks, 1):
        batch = batch_of(chunk.inputs, 0, 0, chunk.first)
        for backend in backends:
            backend.kv.free(0)
        parts, done = [], 0
        for logits, *others in zip(*(logits_in_slices(backend, batch, most) for backend in backends), strict=True):
            following = chunk.following[done : done + len(logits)]
            parts.append(scores_of_two(logits, others[0], following) if others else scores_of(logits, following))
            done += len(following)
        scores = Scores.joined(parts)
        check_finite(model, scores.surprise, f"chunk {number}")
        if base is not None:
            check_finite(base, scores.base, f"chunk {number}")
        yield scores


def check_finite(backend: Backend, surprise: NDArray[np.float64], where: str) -> None:
    """Raise LlmrunError if the surprises of a model's tokens are not finite. `where` is the part of the text."""
    if not np.isfinite(surprise).all():
        path = backend.info.path
        raise LlmrunError(
            f"{path}: {where}: the model computed logits that are not finite numbers",
            hint=f"check the file: llmrun verify {path}",
        )
