"""What a sampler gets besides the candidates, and the state that some samplers carry from token to token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmrun.engine.samplers.breakers import NO_BREAKERS, Breakers
from llmrun.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Place:
    """The place in a sequence for which a token is drawn.

    history     all previous tokens, including the prompt
    params      the request's parameters
    position    the position of the token
    vocabulary  the number of tokens of the model
    breakers    the sequence breakers of DRY
    """

    history: Sequence[int]
    params: SamplingParams
    position: int
    vocabulary: int
    breakers: Breakers = NO_BREAKERS


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
