"""Top-n-sigma, which keeps the tokens whose logits are close to the largest one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from llmrun.engine.samplers.base import Place
from llmrun.engine.samplers.numbers import is_banned
from llmrun.engine.sampling import ordered_sum

if TYPE_CHECKING:
    from llmrun.engine.sampling import Candidates


def top_n_sigma(candidates: Candidates, place: Place) -> Candidates:
    """Ban the tokens whose logits are more than `top_n_sigma` standard deviations below the largest one.

    Tang et al., "Top-nσ: Not All Logits Are You Need" (2024). Like llama.cpp, this keeps banned tokens among the
    candidates, with logits of -inf. They do not count for the deviation.
    """
    n = place.params.top_n_sigma
    ids, logits = candidates
    if n <= 0 or len(ids) < 2:
        return candidates
    banned = is_banned(logits)
    allowed = logits[~banned] if banned.any() else logits
    if not len(allowed):
        return candidates
    mean = ordered_sum(allowed) / len(allowed)
    deviation = math.sqrt(ordered_sum((allowed - mean) ** 2) / len(allowed))
    return ids, np.where(logits < logits.max() - n * deviation, -np.inf, logits)
