"""The state that Mirostat and adaptive-p carry from token to token."""

from __future__ import annotations

from typing import NamedTuple

from llmrun.options.sampling_params import SamplingParams


class SamplerState(NamedTuple):
    """The state of Mirostat and adaptive-p before a draw. Other samplers do not change it.

    mu            Mirostat's largest surprise, in bits
    weighted_sum  adaptive-p's sum of the probabilities of earlier tokens, in which later ones weigh more
    total_weight  the sum of these weights
    """

    mu: float
    weighted_sum: float
    total_weight: float


def initial_state(params: SamplingParams) -> SamplerState:
    """Return the state before an answer's first token."""
    weight = 1 / (1 - params.adaptive_decay)
    return SamplerState(2 * params.mirostat_tau, params.adaptive_target * weight, weight)
