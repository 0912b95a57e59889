"""Adaptive-p, which prefers tokens whose probability is near a target (llama.cpp, pull request 17927)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.engine.samplers.numbers import softmax
from llmrun.engine.samplers.state import SamplerState
from llmrun.options.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llmrun.engine.sampling import Candidates

# The constants of the transform in llama.cpp.
_WIDTH = 0.3
_PEAK_LOGIT = 5.0
_SHARPNESS = 10.0


def prefer_target(candidates: Candidates, params: SamplingParams, state: SamplerState) -> Candidates:
    """Replace the logits with new ones, which are larger the nearer a token's probability is to the adapted target.

    The adapted target compensates for the difference between `adaptive_target` and the mean probability of earlier
    tokens.
    """
    ids, logits = candidates
    target = params.adaptive_target
    if state.total_weight:
        target = 2 * target - state.weighted_sum / state.total_weight
    target = min(max(target, 0.0), 1.0)
    weights, total, _ = softmax(logits)
    distance = np.abs(weights / total - target) / _WIDTH
    return ids, np.where(logits == -np.inf, -np.inf, _PEAK_LOGIT - _SHARPNESS * distance * distance / (1 + distance))


def next_state(candidates: Candidates, token: int, params: SamplingParams, state: SamplerState) -> SamplerState:
    """Return the state after `token` has been drawn. `candidates` have the logits before the transform."""
    ids, logits = candidates
    weights, total, _ = softmax(logits)
    probability = float(weights[ids == token][0]) / total
    return state._replace(
        weighted_sum=probability + params.adaptive_decay * state.weighted_sum,
        total_weight=1 + params.adaptive_decay * state.total_weight,
    )
