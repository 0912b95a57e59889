"""Sampling in readable NumPy: pure functions that turn logits into the next token.

These functions define sampling. The engine runs a kernel with bit-identical results (sampler.py, kernels/sampling).
`sample` applies the functions in the order of llama.cpp's default chain:

    mask -> logit bias -> penalties -> top-k -> top-p -> min-p -> temperature -> draw

samplers.py implements llama.cpp's other samplers, other orders, and Mirostat and adaptive-p, which replace the draw.
samplers.py also uses the functions of this file. docs/adding-a-sampler.md describes how to add a sampler.

The same logits, parameters and position yield the same token on every machine. The random number of a draw is a hash of
(seed, position), the lower id wins a tie, and sums are computed in a fixed order. `exp` uses only operations whose
rounding IEEE 754 defines, because the last bit of the results of NumPy's exp depends on the instruction set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from llmrun.base.errors import InvalidAnswer, ModelFileError
from llmrun.formats.layouts.tokens import (
    EXP_TERMS,
    INVERSE_LN2,
    LN2_HIGH,
    LN2_LOW,
    LOWEST_EXPONENT,
    SMALLEST_TEMPERATURE,
    STRIPES,
)
from llmrun.options.sampling_params import SamplingParams

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Logits = NDArray[np.float32]
    Mask = NDArray[np.uint32]  # one bit per token; see mask_words in layouts/tokens.py
    # The ids and their logits (float64) are parallel arrays, sorted by id at first and by probability after top-k or
    # top-p.
    Candidates = tuple[NDArray[np.intp], NDArray[np.float64]]

_EXP_CHUNK = 4096  # elements per chunk; temporary arrays in the L1 cache make exp 2.2 times as fast for 49k tokens
LARGEST = np.finfo(np.float32).max


def sample(
    logits: Logits, history: Sequence[int], params: SamplingParams, position: int, mask: Mask | None = None
) -> int:
    """Draw the next token and return its id.

    logits    float32[vocabulary], not modified
    history   all previous tokens, including the prompt; the penalties use the most recent ones
    position  the new token's position in its sequence; together with the seed it determines the draw
    mask      the tokens that a constraint allows, uint32[mask_words]; None if it allows all

    Raises ModelFileError if a logit is NaN or +inf or if all are -inf, and LlmrunError if no allowed token is left.
    """
    likeliest = int(np.argmax(logits))
    check_output(float(logits[likeliest]))
    with np.errstate(over="ignore", invalid="ignore"):  # both functions replace overflows and NaN
        changed = apply_mask(logits, mask)
        changed = apply_logit_bias(changed, params.logit_bias)
        changed = apply_penalties(changed, history, params)
    if params.temperature <= 0:  # the filters below can be skipped, because all of them keep the likeliest token
        return likeliest if changed is logits else greedy(changed)
    candidates = top_k(changed, params.top_k)
    candidates = top_p(candidates, params.top_p)
    candidates = min_p(candidates, params.min_p)
    return draw(candidates, params.temperature, uniform(params.seed, position))


def apply_mask(logits: Logits, mask: Mask | None) -> Logits:
    """Set the logits of all tokens that the mask bans to -inf and return the result."""
    if mask is None:
        return logits
    allowed = np.unpackbits(mask.view(np.uint8), bitorder="little", count=len(logits)).view(np.bool_)
    return np.where(allowed, logits, np.float32(-np.inf))


def apply_logit_bias(logits: Logits, bias: Mapping[int, float]) -> Logits:
    """Add each token's bias to its logit and return the result. A bias of -inf bans the token."""
    if not bias:
        return logits
    biased = logits.copy()
    ids, values = bias_arrays(bias)
    biased[ids] = np.minimum(logits[ids] + values, LARGEST)
    return biased


def bias_arrays(bias: Mapping[int, float]) -> tuple[NDArray[np.int32], Logits]:
    """Return the ids and the biases as int32[n] and float32[n]. Biases above the largest float32 are clamped to it."""
    with np.errstate(over="ignore"):
        values = np.array(list(bias.values()), np.float32)
    return np.array(list(bias), np.int32), np.minimum(values, LARGEST)


def apply_penalties(logits: Logits, history: Sequence[int], params: SamplingParams) -> Logits:
    """Penalize the tokens that occur in the last `repeat_last_n` tokens of the history, and return the new logits.

    repeat_penalty divides positive logits and multiplies negative ones. frequency_penalty is subtracted once per
    occurrence, and presence_penalty once per token.
    """
    if not penalizes(params) or params.repeat_last_n == 0 or not history:
        return logits
    recent = history if params.repeat_last_n < 0 else history[-params.repeat_last_n :]
    ids, counts = np.unique(np.asarray(recent, np.intp), return_counts=True)
    repeat = np.float32(params.repeat_penalty)
    seen = logits[ids]
    seen = np.where(seen <= 0, seen * repeat, seen / repeat)
    seen -= counts.astype(np.float32) * np.float32(params.frequency_penalty)
    seen -= np.float32(params.presence_penalty)
    penalized = logits.copy()
    penalized[ids] = np.nan_to_num(seen)
    return penalized


def penalizes(params: SamplingParams) -> bool:
    """Return whether any penalty is enabled."""
    return params.repeat_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def greedy(logits: Logits) -> int:
    """Return the id of the most likely token, or the lowest such id if several tokens are equally likely."""
    best = int(np.argmax(logits))
    check_any_left(float(logits[best]))
    return best


def top_k(logits: Logits | NDArray[np.float64], k: int) -> Candidates:
    """Return the k most likely candidates, sorted by probability, or all in order of id if k <= 0.

    Banned ids, whose logits are -inf, are never among the k candidates.
    """
    check_any_left(float(logits.max()))
    if k <= 0:
        return np.arange(len(logits)), logits.astype(np.float64)
    ids = likeliest(logits, k)
    ids = ids[logits[ids] > -np.inf]
    return ids, logits[ids].astype(np.float64)


def likeliest(logits: Logits | NDArray[np.float64], k: int) -> NDArray[np.intp]:
    """Return the ids of the k > 0 largest logits, sorted.

    To avoid sorting the whole vocabulary, the logits are split into stripes. At least k logits are as large as the k-th
    largest stripe maximum or larger, so only those logits, a few dozen more than k, have to be sorted.
    """
    depth = len(logits) // STRIPES
    if k <= STRIPES and depth > 1:
        maxima = logits[: depth * STRIPES].reshape(depth, STRIPES).max(axis=0)
        bound = np.partition(maxima, STRIPES - k)[STRIPES - k]
        ids = np.flatnonzero(logits >= bound)
    else:
        ids = np.arange(len(logits))
    return ids[np.argsort(-logits[ids], kind="stable")[:k]]


def top_p(candidates: Candidates, p: float) -> Candidates:
    """Return the smallest set of most likely candidates whose probabilities sum to at least p.

    The result is sorted by probability. If p >= 1, the candidates are returned unchanged.

    Candidates with a probability below (1 - p)/n are removed before sorting, because together they have a probability
    of less than 1 - p.
    """
    if p >= 1:
        return candidates
    ids, logits = candidates
    weights = exp(logits - logits.max())
    total = ordered_sum(weights)
    likely = np.flatnonzero(weights >= (1 - p) / len(ids) * total)
    order = likely[np.argsort(-logits[likely], kind="stable")]
    reached = int(np.searchsorted(np.cumsum(weights[order]), p * total)) + 1
    return ids[order[:reached]], logits[order[:reached]]


def min_p(candidates: Candidates, p: float) -> Candidates:
    """Return the candidates that are at least p times as probable as the likeliest one, or all if p <= 0."""
    if p <= 0:
        return candidates
    ids, logits = candidates
    likely = np.flatnonzero(exp(logits - logits.max()) >= min(p, 1.0))
    return ids[likely], logits[likely]


def draw(candidates: Candidates, temperature: float, u: float) -> int:
    """Draw an id with the probabilities softmax(logits / temperature), using the random number u in [0, 1)."""
    ids, logits = candidates
    cumulative = np.cumsum(exp((logits - logits.max()) / max(temperature, SMALLEST_TEMPERATURE)))
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return int(ids[min(index, len(ids) - 1)])  # u * total may round up to the total


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends only on seed and position: the upper 53 bits of splitmix64 over both."""
    return (_mix(_mix(seed) + position) >> 11) * 2.0**-53


# The result of `log_probabilities` if the largest logit is not finite.
NO_LOG_PROBABILITIES: tuple[float, list[tuple[int, float]]] = (math.nan, [])


def log_probabilities(logits: Logits, token: int, n: int) -> tuple[float, list[tuple[int, float]]]:
    """Return the natural log-probability of `token` and those of the n likeliest ids, sorted.

    `logits` are the model's output, before bias, penalties and temperature. If the largest logit is not finite,
    the log-probability is NaN and the list is empty.
    """
    largest = float(logits.max())
    if not np.isfinite(largest):
        return NO_LOG_PROBABILITIES
    ids = likeliest(logits, n).tolist() if n > 0 else []
    return described_log_probabilities(
        logits, token, ids, largest, ordered_sum(exp(logits.astype(np.float64) - largest))
    )


def described_log_probabilities(
    logits: Logits, token: int, ids: Sequence[int], largest: float, total: float
) -> tuple[float, list[tuple[int, float]]]:
    """Return the result of `log_probabilities` for the likeliest `ids`.

    largest  the largest logit
    total    the sum of exp(logit - largest)
    """
    log_total = largest + float(np.log(total))
    return float(logits[token]) - log_total, [(i, float(logits[i]) - log_total) for i in ids]


def bad_output(best: float) -> ModelFileError:
    """Return the error for a largest logit that is not finite."""
    return ModelFileError(
        f"invalid model output: the largest logit is {best} instead of a finite number",
        hint="check the model file with llmrun verify, or try another backend",
    )


def nothing_left() -> InvalidAnswer:
    """Return the error for a logit bias that bans every allowed token."""
    return InvalidAnswer("cannot choose a token: logit_bias bans every token that the model and the format allow")


def check_output(best: float) -> None:
    """Raise ModelFileError if `best`, the logit at np.argmax, is not finite. If any logit is NaN, `best` is NaN."""
    if not np.isfinite(best):
        raise bad_output(best)


def check_any_left(best: float) -> None:
    """Raise LlmrunError if `best`, the largest logit after bias and penalties, is -inf."""
    if best == -np.inf:
        raise nothing_left()


def _mix(value: int) -> int:
    """Hash a 64-bit integer with splitmix64: add the increment, then apply the finalizer."""
    mask = 0xFFFFFFFFFFFFFFFF
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def ordered_sum(values: NDArray[np.float64]) -> float:
    """Sum from left to right. np.sum may add the elements in a different order on each instruction set."""
    return float(np.cumsum(values)[-1])


def exp(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute e^x for x <= 0 with an error of at most 2 units in the last place."""
    if len(x) <= _EXP_CHUNK:
        return _exp_chunk(x)
    return np.concatenate([_exp_chunk(x[i : i + _EXP_CHUNK]) for i in range(0, len(x), _EXP_CHUNK)])


def _exp_chunk(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute e^x as 2^n e^r, where x = n ln 2 + r and |r| <= ln 2 / 2.

    e^r is a Taylor polynomial. 2^n is written directly into the exponent bits.
    """
    bounded = np.maximum(x, LOWEST_EXPONENT)
    n = np.rint(bounded * INVERSE_LN2)
    r = bounded - n * LN2_HIGH
    r -= n * LN2_LOW
    result = np.full_like(r, EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        result *= r
        result += term
    result *= ((n.astype(np.int64) + 1023) << 52).view(np.float64)
    result[x < LOWEST_EXPONENT] = 0.0
    return result
