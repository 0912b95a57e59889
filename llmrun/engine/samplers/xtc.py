"""XTC (exclude top choices), which sometimes removes the likeliest tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.engine.samplers.base import Place
from llmrun.engine.samplers.needs import uses_xtc
from llmrun.engine.sampling import exp, ordered_sum, uniform

if TYPE_CHECKING:
    from llmrun.engine.sampling import Candidates

_SEED = 0x585443  # "XTC"; separates the random numbers of XTC from those of the draws


def xtc(candidates: Candidates, place: Place) -> Candidates:
    """Remove the top choices, but only with probability `xtc_probability`. `without_top_choices` defines them.

    The idea is from text-generation-webui, pull request 6335. At least one token always stays.
    """
    params = place.params
    if not uses_xtc(params):
        return candidates
    if uniform(params.seed ^ _SEED, place.position) > params.xtc_probability:
        return candidates
    return without_top_choices(candidates, params.xtc_threshold)


def without_top_choices(candidates: Candidates, threshold: float) -> Candidates:
    """Remove the tokens with a probability of at least `threshold`, except for the least likely of them.

    If several are equally unlikely, the last of them stays.
    """
    ids, logits = candidates
    weights = exp(logits - logits.max())
    top = np.flatnonzero((weights >= threshold * ordered_sum(weights)) & (logits > -np.inf))
    if len(top) < 2:
        return candidates
    stays = top[len(top) - 1 - int(np.argmin(logits[top][::-1]))]
    kept = np.ones(len(ids), np.bool_)
    kept[top] = False
    kept[stays] = True
    return ids[kept], logits[kept]
