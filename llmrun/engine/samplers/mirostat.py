"""Mirostat 1 and 2, which keep the surprise of the tokens near a target.

Basu et al., "Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity" (2020). The surprise of a
token is its negative binary log-probability. Both versions remove tokens that are too surprising, draw one of the
others, and correct mu, the bound, by the difference between the drawn token's surprise and the target.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from llmrun.engine import sampling
from llmrun.engine.samplers.numbers import LN2, exp_of, log, softmax
from llmrun.engine.sampling import ordered_sum
from llmrun.options.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llmrun.engine.sampling import Candidates

_ESTIMATED = 100  # the number of likeliest tokens from which version 1 estimates the exponent of Zipf's law
_RATIO_LOGS = np.array([log((i + 2) / (i + 1)) for i in range(_ESTIMATED - 1)])


def keep_unsurprising(candidates: Candidates, params: SamplingParams, mu: float, vocabulary: int) -> Candidates:
    """Return the candidates from which Mirostat draws, for the current mu."""
    ids, logits = candidates
    possible = np.flatnonzero(logits > -np.inf)
    if len(possible) < len(ids):
        candidates = ids[possible], logits[possible]
    return _keep_1(candidates, mu, vocabulary) if params.mirostat == 1 else _keep_2(candidates, mu)


def next_mu(candidates: Candidates, token: int, params: SamplingParams, mu: float) -> float:
    """Return mu after `token` has been drawn from the candidates that were kept."""
    ids, logits = candidates
    surprise = float(softmax(logits).nats[ids == token][0]) / LN2
    return mu - params.mirostat_eta * (surprise - params.mirostat_tau)


def _keep_1(candidates: Candidates, mu: float, vocabulary: int) -> Candidates:
    """Keep the k likeliest tokens, where k follows from mu and an estimate of the exponent s of Zipf's law.

    k is ((s - 1) 2^mu / (1 - vocabulary^(1 - s)))^(1/s).
    """
    ids, logits = candidates
    _, top = sampling.top_k(logits, _ESTIMATED)
    order, sorted_logits = sampling.top_k(logits, _k(top, mu, vocabulary, len(ids)))
    return ids[order], sorted_logits


def _k(top: np.ndarray[tuple[int], np.dtype[np.float64]], mu: float, vocabulary: int, n: int) -> int:
    """Return k, between 1 and n, given the largest logits, sorted."""
    if n < 2:
        return 1
    logs = _RATIO_LOGS[: len(top) - 1]
    s = ordered_sum(logs * (top[:-1] - top[1:])) / ordered_sum(logs * logs)
    size_log = log(vocabulary)
    shrinking = 1 - exp_of((1 - s) * size_log)
    fraction = (s - 1) / shrinking if shrinking else 1 / size_log  # the limit for s = 1
    # In logarithms, because 2^mu and k may overflow. If s is 0, k is 1 or as large as possible.
    log_k = log(fraction) + mu * LN2 if fraction > 0 else -math.inf
    log_k = log_k / s if s > 0 else math.copysign(math.inf, log_k)
    return n if log_k >= log(n) else max(1, int(exp_of(log_k)))


def _keep_2(candidates: Candidates, mu: float) -> Candidates:
    """Keep the tokens whose surprise is at most mu, or the likeliest one."""
    ids, logits = candidates
    kept = np.flatnonzero(softmax(logits).nats <= mu * LN2)
    if not len(kept):
        kept = np.array([np.argmax(logits)])
    return ids[kept], logits[kept]
