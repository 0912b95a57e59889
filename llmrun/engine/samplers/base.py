"""The place in a sequence, which samplers receive along with the candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmrun.engine.samplers.breakers import NO_BREAKERS, Breakers
from llmrun.options.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llmrun.model.tokenizers.base import Tokenizer


@dataclass(frozen=True, slots=True)
class Place:
    """The place in a sequence for which a token is drawn.

    history     all previous tokens, including the prompt
    params      the request's parameters
    position    the position of the token
    vocabulary  the number of tokens of the model
    breakers    the sequence breakers of DRY
    tokenizer   tells the infill sampler the tokens' texts; without one, that sampler does nothing
    end         the likeliest token that ends the answer, or None if none is allowed; only for the infill sampler
    """

    history: Sequence[int]
    params: SamplingParams
    position: int
    vocabulary: int
    breakers: Breakers = NO_BREAKERS
    tokenizer: Tokenizer | None = None
    end: int | None = None
