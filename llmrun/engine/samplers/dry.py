"""DRY (don't repeat yourself), a penalty for tokens that would continue a repetition.

The idea is from text-generation-webui, pull request 5677, and the treatment of sequence breakers from koboldcpp, pull
request 982. llama.cpp has both, and this module follows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.engine.samplers.base import Place
from llmrun.engine.samplers.needs import uses_dry
from llmrun.engine.samplers.numbers import integer_power, log
from llmrun.engine.samplers.repetitions import suffix_lengths
from llmrun.engine.sampling import LARGEST
from llmrun.options.sampling_params import SamplingParams

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.engine.sampling import Candidates

_LARGEST_LOG = 88.7228391  # the log of the largest float32; llama.cpp limits the exponents of penalties with it
_SMALLEST_BASE = 1.000001  # smaller bases have no limit


def dry(candidates: Candidates, place: Place) -> Candidates:
    """Penalize the tokens that would continue a repetition of the last tokens, except for single-token breakers.

    If the last n tokens occur earlier, followed by a token, that token's penalty is
    `dry_multiplier * dry_base ** (n - dry_allowed_length)`. Sequences do not extend across a breaker.
    """
    params = place.params
    if not uses_dry(params):
        return candidates
    tokens, lengths = _continued_repetitions(place)
    if not len(tokens):
        return candidates
    ids, logits = candidates
    penalties = np.zeros(place.vocabulary, np.float32)
    penalties[tokens] = _penalties(lengths - params.dry_allowed_length, params)
    chosen = penalties[ids]
    penalized = np.maximum(logits.astype(np.float32) - chosen, -LARGEST)
    return ids, np.where((chosen > 0) & (logits > -np.inf), penalized, logits)


def _continued_repetitions(place: Place) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Return the tokens that would continue a repetition, with the longest repetition that each would continue."""
    params = place.params
    nothing = np.zeros(0, np.intp), np.zeros(0, np.int64)
    last_n, allowed = params.dry_penalty_last_n, params.dry_allowed_length
    recent = place.history[-last_n:] if last_n > 0 else place.history
    latest_first = np.array(recent, np.intp)[::-1]
    if len(latest_first) <= allowed:
        return nothing
    longest = place.breakers.distance(latest_first)
    if longest < allowed:
        return nothing
    lengths = np.minimum(suffix_lengths(latest_first, max(allowed, 1)), longest)
    ends = np.flatnonzero(lengths[1:] >= allowed)  # lengths[i + 1] tokens are repeated, and latest_first[i] follows
    tokens, lengths = latest_first[ends], lengths[1:][ends]
    by_token = np.lexsort((lengths, tokens))
    is_longest = tokens[by_token] != np.append(tokens[by_token][1:], -1)
    found = by_token[is_longest]
    single = place.breakers.single[tokens[found]] if len(place.breakers.single) else np.zeros(len(found), np.bool_)
    return tokens[found][~single], lengths[found][~single]


def _penalties(exponents: NDArray[np.int64], params: SamplingParams) -> NDArray[np.float32]:
    base = float(np.float32(params.dry_base))
    largest = int(_LARGEST_LOG / log(base)) if base > _SMALLEST_BASE else 0
    if largest:
        exponents = np.minimum(exponents, largest)
    distinct, place = np.unique(exponents, return_inverse=True)
    values = [params.dry_multiplier * integer_power(base, exponent) for exponent in distinct.tolist()]
    with np.errstate(over="ignore"):
        return np.array(values).astype(np.float32)[place]
