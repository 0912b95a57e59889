"""From logits to the next token: pure functions that `sample` calls in the order of llama.cpp's default chain.

    logit bias -> penalties -> top-k -> top-p -> min-p -> temperature -> draw

llama.cpp's whole chain is penalties, DRY, top-n-sigma, top-k, typical-p, top-p, min-p, XTC, temperature: a new sampler
takes its place there (docs/adding-a-sampler.md).

The same logits, parameters and position give the same token on every machine: a draw is a hash of (seed, position),
equal logits go to the lower id, sums run in one fixed order, and `_exp` uses only operations that IEEE 754 rounds
alike everywhere (the last bit of NumPy's own exp depends on the instruction set).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from llmrun.errors import LlmrunError, ModelFileError
from llmrun.sampling_params import SamplingParams

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Logits = NDArray[np.float32]
    # Ids and their logits as float64, in step: by id at first, most likely first once top-k or top-p has sorted.
    Candidates = tuple[NDArray[np.intp], NDArray[np.float64]]

_TOP_K_STRIPES = 1024  # 256 to 4,096 measure alike at 49k and 152k tokens
_EXP_CHUNK = 4096  # elements whose intermediate arrays stay in the first-level cache: 2.2 times as fast at 49k
_LARGEST = np.finfo(np.float32).max
_SMALLEST = 1e-9  # temperatures and penalties below act as this: nothing overflows in float32 / 1e-9


def sample(logits: Logits, history: Sequence[int], params: SamplingParams, position: int) -> int:
    """Draw the next token.

    logits    float32[vocabulary], left as they are
    history   all tokens before the drawn one, prompt included: the penalties look at its end
    position  where the drawn token stands in its sequence; with the seed it decides the draw

    Raises ModelFileError when a logit is NaN or +inf, or when every one is -inf, and LlmrunError when a bias rules out
    every token.
    """
    likeliest = int(np.argmax(logits))
    _check_output(float(logits[likeliest]))
    with np.errstate(over="ignore", invalid="ignore"):  # both end in finite numbers
        changed = apply_logit_bias(logits, params.logit_bias)
        changed = apply_penalties(changed, history, params)
    if params.temperature <= 0:  # the filters below all keep the likeliest token
        return likeliest if changed is logits else greedy(changed)
    candidates = top_k(changed, params.top_k)
    candidates = top_p(candidates, params.top_p)
    candidates = min_p(candidates, params.min_p)
    return draw(candidates, params.temperature, uniform(params.seed, position))


def apply_logit_bias(logits: Logits, bias: Mapping[int, float]) -> Logits:
    """Add a number to the logits of some ids; -inf bans a token."""
    if not bias:
        return logits
    biased = logits.copy()
    ids = list(bias)
    biased[ids] = np.minimum(logits[ids] + np.array(list(bias.values()), np.float32), _LARGEST)
    return biased


def apply_penalties(logits: Logits, history: Sequence[int], params: SamplingParams) -> Logits:
    """Make the last `repeat_last_n` tokens of history less likely.

    repeat_penalty divides a positive logit and multiplies a negative one; frequency_penalty is subtracted once per
    occurrence, presence_penalty once.
    """
    neutral = params.repeat_penalty == 1 and params.presence_penalty == 0 and params.frequency_penalty == 0
    if neutral or params.repeat_last_n == 0 or not history:
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


def greedy(logits: Logits) -> int:
    """The most likely id, the lowest of equals."""
    best = int(np.argmax(logits))
    _check_any_left(float(logits[best]))
    return best


def top_k(logits: Logits, k: int) -> Candidates:
    """The k most likely ids, sorted; all of them, by id, when k <= 0.

    Never sorts the vocabulary: k stripes hold a logit at least as large as the k-th largest stripe maximum, so only
    logits that reach it can be among the k largest (a few dozen more than k).
    """
    _check_any_left(float(logits.max()))
    depth = len(logits) // _TOP_K_STRIPES
    if 0 < k <= _TOP_K_STRIPES and depth > 1:
        maxima = logits[: depth * _TOP_K_STRIPES].reshape(depth, _TOP_K_STRIPES).max(axis=0)
        bound = np.partition(maxima, _TOP_K_STRIPES - k)[_TOP_K_STRIPES - k]
        ids = np.flatnonzero(logits >= bound)
    else:
        ids = np.arange(len(logits))
    if k <= 0:
        return ids, logits.astype(np.float64)
    ids = ids[np.argsort(-logits[ids], kind="stable")[:k]]
    return ids, logits[ids].astype(np.float64)


def top_p(candidates: Candidates, p: float) -> Candidates:
    """The fewest most likely candidates whose probabilities reach p together, sorted; all when p >= 1.

    Candidates below (1 - p)/n of the whole cannot make up more than 1 - p even together, so they are left out
    before sorting.
    """
    if p >= 1:
        return candidates
    ids, logits = candidates
    weights = _exp(logits - logits.max())
    total = _sum(weights)
    likely = np.flatnonzero(weights >= (1 - p) / len(ids) * total)
    order = likely[np.argsort(-logits[likely], kind="stable")]
    reached = int(np.searchsorted(np.cumsum(weights[order]), p * total)) + 1
    return ids[order[:reached]], logits[order[:reached]]


def min_p(candidates: Candidates, p: float) -> Candidates:
    """The candidates at least p times as probable as the likeliest; all when p <= 0."""
    if p <= 0:
        return candidates
    ids, logits = candidates
    likely = np.flatnonzero(_exp(logits - logits.max()) >= min(p, 1.0))
    return ids[likely], logits[likely]


def draw(candidates: Candidates, temperature: float, u: float) -> int:
    """One id, with the probabilities softmax(logits / temperature); u in [0, 1) decides which."""
    ids, logits = candidates
    cumulative = np.cumsum(_exp((logits - logits.max()) / max(temperature, _SMALLEST)))
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return int(ids[min(index, len(ids) - 1)])  # the product may round up to the total


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but seed and position: splitmix64 over both, the upper 53 bits."""
    return (_mix(_mix(seed) + position) >> 11) * 2.0**-53


def log_probabilities(logits: Logits, token: int, n: int) -> tuple[float, list[tuple[int, float]]]:
    """Natural-log softmax of the logits as the model gave them: of `token`, and of the n likeliest ids, sorted."""
    ids, _ = top_k(logits, n) if n > 0 else (np.arange(0), None)
    largest = float(logits.max())
    log_total = largest + float(np.log(_sum(_exp(logits.astype(np.float64) - largest))))
    return float(logits[token]) - log_total, [(int(i), float(logits[i]) - log_total) for i in ids]


def _check_output(best: float) -> None:
    """What the model itself gave. `best` is the logit that np.argmax finds, which is a NaN when there is one."""
    if not np.isfinite(best):
        raise ModelFileError(
            f"the model's output is broken: logits: largest is {best}, a finite number is needed",
            hint="check the model file (llmrun verifies its sha256 when it downloads one), or try another backend",
        )


def _check_any_left(best: float) -> None:
    """After bias and penalties."""
    if best == -np.inf:
        raise LlmrunError("every token is ruled out: logits: all are -inf, at least one finite is needed")


def _mix(value: int) -> int:
    """splitmix64: one step of its counter and its finalizer."""
    mask = 0xFFFFFFFFFFFFFFFF
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def _sum(values: NDArray[np.float64]) -> float:
    """Left to right. np.sum adds in an order of its own, which may differ between instruction sets."""
    return float(np.cumsum(values)[-1])


_LOWEST_EXPONENT = -700.0  # below, a probability counts as 0; 2^n stays a normal number above
_LN2_HIGH = 0.693147180369123816490  # ln 2 to 33 bits, so that n * _LN2_HIGH is exact
_LN2_LOW = 1.90821492927058770002e-10
_EXP_TERMS = [1 / 6227020800, 1 / 479001600, 1 / 39916800, 1 / 3628800, 1 / 362880, 1 / 40320, 1 / 5040]
_EXP_TERMS += [1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0]  # 1/13! ... 1/0!: the rest is below 1e-17


def _exp(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """e^x for x <= 0, within 2 units in the last place."""
    if len(x) <= _EXP_CHUNK:
        return _exp_chunk(x)
    return np.concatenate([_exp_chunk(x[i : i + _EXP_CHUNK]) for i in range(0, len(x), _EXP_CHUNK)])


def _exp_chunk(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """x = n ln 2 + r with |r| <= ln 2 / 2; a Taylor polynomial in r, times 2^n written into the exponent bits."""
    bounded = np.maximum(x, _LOWEST_EXPONENT)
    n = np.rint(bounded * (1 / 0.6931471805599453))
    r = bounded - n * _LN2_HIGH
    r -= n * _LN2_LOW
    result = np.full_like(r, _EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        result *= r
        result += term
    result *= ((n.astype(np.int64) + 1023) << 52).view(np.float64)
    result[x < _LOWEST_EXPONENT] = 0.0
    return result
