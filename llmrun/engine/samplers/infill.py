"""The sampler for filling in the middle, which ends answers sooner.

The rule and the numbers are llama.cpp's (`llama_sampler_init_infill`). It is meant to follow top-k and top-p.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from llmrun.engine.samplers.base import Place
from llmrun.engine.samplers.numbers import softmax
from llmrun.engine.sampling import ordered_sum

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.engine.sampling import Candidates

_END_WEIGHT: Final = 3.0
_LEAST: Final = 0.2  # the minimum probability of a token that continues the answer
_MOST_JOINED: Final = 128  # candidates; comparing all tokens of a vocabulary with each other takes minutes


def infill(candidates: Candidates, place: Place) -> Candidates:
    """Return the candidates that end the answer, or those that are likely enough to continue it.

    Only ends stay if three times their probability, times the number of candidates, exceeds that of all others. If not,
    tokens are joined: if the text of one is the beginning of another's, the likelier of the two gets the probability
    of both, and the other is removed. Then ends stay, and so do other tokens with a probability of at least 0.2 and at
    least 1 / (their number + 1) of what stays. If there are none of these, the answer ends.
    """
    if place.tokenizer is None:
        return candidates
    ids, logits = candidates
    weights, total, _ = softmax(logits)
    ends = np.isin(ids, [*place.tokenizer.end_of_generation]) & (weights > 0)
    if _END_WEIGHT * _sum(weights[ends]) * len(ids) > _sum(weights[~ends]):
        return ids[ends], logits[ends]
    order = np.argsort(-logits, kind="stable")[:_MOST_JOINED].tolist()
    texts = [place.tokenizer.token_bytes(int(ids[i])) for i in order]
    likely = dict(zip(order, _joined((weights[order] / total).tolist(), texts), strict=True))
    kept = [i for i, p in likely.items() if p >= _LEAST or (ends[i] and p)]
    n_texts = len(kept) - int(ends[kept].sum())
    if not n_texts:
        return _ended(candidates, place)
    least = sum(likely[i] for i in kept) / (n_texts + 1)
    kept = sorted(i for i in kept if likely[i] >= least or ends[i])
    return ids[kept], logits[kept]


def _sum(weights: NDArray[np.float64]) -> float:
    return ordered_sum(weights) if len(weights) else 0.0


def _joined(p: list[float], texts: Sequence[bytes]) -> list[float]:
    """Return the probabilities after joining tokens. Removed tokens have 0."""
    for i, text in enumerate(texts):
        for j, other in enumerate(texts):
            if not p[i]:
                break
            if i != j and p[j] and text and other.startswith(text):
                into, removed = (j, i) if p[j] > p[i] else (i, j)
                p[into] += p[removed]
                p[removed] = 0.0
    return p


def _ended(candidates: Candidates, place: Place) -> Candidates:
    """Return only the token that ends the answer or, if the answer must go on, the likeliest one."""
    ids, logits = candidates
    best = int(np.argmax(logits))
    if place.end is None:
        return ids[best : best + 1], logits[best : best + 1]
    return np.array([place.end], ids.dtype), np.zeros(1, logits.dtype)
