"""Locally typical sampling, which keeps the tokens whose surprise is close to the expected one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.engine.samplers.base import Place
from llmrun.engine.samplers.numbers import softmax

if TYPE_CHECKING:
    from llmrun.engine.sampling import Candidates


def typical_p(candidates: Candidates, place: Place) -> Candidates:
    """Return the most typical candidates, just enough that their probabilities sum to more than `typical_p`.

    They keep their order. A token is typical if its surprise, which is its negative log-probability, is close to the
    entropy. Meister et al., "Locally Typical Sampling" (2022). Tokens that cannot be drawn are the least typical;
    llama.cpp gets NaN for them.
    """
    p = place.params.typical_p
    if p >= 1:
        return candidates
    ids, logits = candidates
    weights, total, nats = found = softmax(logits)
    order = np.argsort(np.abs(nats - found.entropy), kind="stable")
    n = int(np.searchsorted(np.cumsum(weights[order]), p * total, side="right")) + 1
    kept = np.sort(order[:n])
    return ids[kept], logits[kept]
