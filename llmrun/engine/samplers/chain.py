"""Draws a token with the samplers and the order that a request asks for.

    mask -> logit bias -> the samplers in `samplers` -> draw
    mask -> logit bias -> the samplers in `samplers` -> adaptive-p -> draw    with an adaptive target
    mask -> logit bias -> temperature -> Mirostat -> draw                     with Mirostat, which ignores `samplers`

The default of `samplers` is llama.cpp's order:

    penalties -> DRY -> top-n-sigma -> top-k -> typical-p -> top-p -> min-p -> XTC -> temperature

The sampler "infill" is used only if it is listed.

A sampler is a pure function of the candidates and their place in the sequence. If no sampler of this folder is enabled
and the order is the default, the draws equal those of sampling.py, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from llmrun.base.sampling_texts import ADAPTIVE_P, INFILL, TEMPERATURE, parse_samplers
from llmrun.engine import sampling
from llmrun.engine.samplers import adaptive, mirostat
from llmrun.engine.samplers.base import Place
from llmrun.engine.samplers.dry import dry
from llmrun.engine.samplers.infill import infill
from llmrun.engine.samplers.state import SamplerState
from llmrun.engine.samplers.temperature import apply_temperature, temperature, temperature_of
from llmrun.engine.samplers.top_n_sigma import top_n_sigma
from llmrun.engine.samplers.typical import typical_p
from llmrun.engine.samplers.xtc import xtc
from llmrun.options.sampling_params import SamplingParams

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.engine.sampling import Candidates, Logits, Mask

Sampler = Callable[["Candidates", Place], "Candidates"]


def penalties(candidates: Candidates, place: Place) -> Candidates:
    """Penalize recent tokens, but not banned ones, whose logits stay -inf."""
    ids, logits = candidates
    by_id = np.zeros(place.vocabulary, np.float32)  # `apply_penalties` expects the logits of all tokens
    by_id[ids] = logits
    penalized = sampling.apply_penalties(by_id, place.history, place.params)
    return candidates if penalized is by_id else (ids, np.where(logits > -np.inf, penalized[ids], logits))


def top_k(candidates: Candidates, place: Place) -> Candidates:
    """Return the `top_k` most likely candidates, sorted by probability."""
    if place.params.top_k <= 0:
        return candidates
    ids, logits = candidates
    order, kept = sampling.top_k(logits, place.params.top_k)
    return ids[order], kept


# The samplers by llama.cpp's names. "adaptive_p" is not among them, because it always comes last.
SAMPLERS: dict[str, Sampler] = {
    "penalties": penalties,
    "dry": dry,
    "top_n_sigma": top_n_sigma,
    "top_k": top_k,
    "typ_p": typical_p,
    "top_p": lambda candidates, place: sampling.top_p(candidates, place.params.top_p),
    "min_p": lambda candidates, place: sampling.min_p(candidates, place.params.min_p),
    "xtc": xtc,
    INFILL: infill,
    TEMPERATURE: temperature,
}


def sample(logits: Logits, place: Place, state: SamplerState, mask: Mask | None = None) -> tuple[int, SamplerState]:
    """Draw the next token. Return its id, and the state of the samplers after it.

    logits  float32[vocabulary], not modified
    mask    the tokens that a constraint allows, uint32[mask_words]; None if it allows all

    Raises the errors of `sampling.sample`.
    """
    params = place.params
    u = sampling.uniform(params.seed, place.position)
    candidates = _all_tokens(logits, params, mask)
    if params.mirostat:
        return _draw_mirostat(apply_temperature(candidates, params.temperature), place, state, u)
    names = [name for name in parse_samplers(params.samplers) if name != ADAPTIVE_P]
    if INFILL in names:
        place = replace(place, end=_likeliest_end(candidates, place))
    if params.adaptive_target >= 0:
        candidates = apply_samplers(candidates, names, place)
        preferred = adaptive.prefer_target(candidates, params, state)
        token = sampling.draw(preferred, 1.0, u)
        return token, adaptive.next_state(candidates, token, params, state)
    if names[-1:] != [TEMPERATURE]:
        return sampling.draw(apply_samplers(candidates, names, place), 1.0, u), state
    candidates = apply_samplers(candidates, names[:-1], place)
    value = temperature_of(candidates, params)
    if value <= 0:
        return int(apply_temperature(candidates, value)[0][0]), state
    return sampling.draw(candidates, value, u), state  # rounded as in sampling.py


def apply_samplers(candidates: Candidates, names: Iterable[str], place: Place) -> Candidates:
    """Apply samplers in order."""
    with np.errstate(over="ignore", invalid="ignore"):  # the samplers replace overflows and NaN
        for name in names:
            kept = SAMPLERS[name](candidates, place)
            candidates = kept if len(kept[0]) else candidates  # in unusual orders, rounding may remove all of them
    return candidates


def _all_tokens(logits: Logits, params: SamplingParams, mask: Mask | None) -> Candidates:
    """Return all tokens with their logits and biases, after the checks of `sampling.sample`."""
    sampling.check_output(float(logits[np.argmax(logits)]))
    with np.errstate(over="ignore", invalid="ignore"):
        biased = sampling.apply_logit_bias(sampling.apply_mask(logits, mask), params.logit_bias)
    sampling.check_any_left(float(biased.max()))
    ids: NDArray[np.intp] = np.arange(len(biased))
    return ids, biased.astype(np.float64)


def _likeliest_end(candidates: Candidates, place: Place) -> int | None:
    """Return the token with the largest logit that ends the answer, or None if all of them are banned."""
    if place.tokenizer is None:
        return None
    logits = candidates[1]  # the logits of all tokens
    ends = sorted(place.tokenizer.end_of_generation)
    best = max(ends, key=lambda token: logits[token], default=None)
    return None if best is None or logits[best] == -np.inf else best


def _draw_mirostat(candidates: Candidates, place: Place, state: SamplerState, u: float) -> tuple[int, SamplerState]:
    params = place.params
    kept = mirostat.keep_unsurprising(candidates, params, state.mu, place.vocabulary)
    token = sampling.draw(kept, 1.0, u)
    return token, state._replace(mu=mirostat.next_mu(kept, token, params, state.mu))
