"""Bounds for the rounding errors of libllama's samplers, which compute in float32.

Our samplers compute in float64. Near a boundary, such as top-p's p, both may decide differently about a candidate. The
functions here return which candidates either must decide about in the same way, because they are farther from the
boundary than float32 can be wrong.

The errors are those of replaying libllama's operations in float32, times two, plus a multiple of the unit roundoff,
because the last bit of libllama's expf may differ from NumPy's.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Logits = NDArray[np.float64]

UNIT = 2.0**-24  # float32's unit roundoff


class Certain(NamedTuple):
    """The candidates that must be kept and those that must be dropped. For the others, it depends on the rounding."""

    kept: NDArray[np.bool_]
    dropped: NDArray[np.bool_]


class Shares(NamedTuple):
    """Probabilities in float64, in float32, and the bound for the relative error of the latter."""

    exact: NDArray[np.float64]
    rounded: NDArray[np.float32]
    error: float


def shares(logits: Logits) -> Shares:
    """Return the softmax of logits that libllama has in this order."""
    weights = np.exp(logits - logits.max())
    total = math.fsum(weights.tolist())
    rounded = np.exp((logits - logits.max()).astype(np.float32))
    total_32 = np.cumsum(rounded, dtype=np.float32)[-1]
    finite = logits[np.isfinite(logits)]
    largest_difference = float(np.ptp(finite)) if len(finite) else 0.0
    error = sum_error(len(logits)) + 2 * abs(float(total_32) / total - 1) + 2 * UNIT * largest_difference
    return Shares(weights / total, rounded / total_32, error)


def sum_error(n: int) -> float:
    """Return a bound for the relative error of a float32 sum, but for what a replay shows: 3.5 standard deviations."""
    return 2 * UNIT * (4 + math.sqrt(n))


def certain_everything(n: int) -> Certain:
    """Return that no decision depends on rounding: any difference but a tie is a mismatch."""
    return Certain(np.ones(n, np.bool_), np.ones(n, np.bool_))


def certain_top_p(logits: Logits, p: float) -> Certain:
    """A candidate is kept if the sum of those before it is below p."""
    order = np.argsort(-logits, kind="stable")
    found = shares(logits)
    return _by_sum(found.exact[order], found.rounded[order], found.error, p, order)


def certain_min_p(logits: Logits, p: float) -> Certain:
    margin = logits - (logits.max() + math.log(p))
    error = 4 * UNIT * (1 + abs(float(logits.max())) + abs(math.log(p)))
    return Certain(margin > error, margin < -error)


def certain_top_n_sigma(logits: Logits, n: float) -> Certain:
    allowed = logits[np.isfinite(logits)]
    threshold = logits.max() - n * allowed.std()
    rounded = allowed.astype(np.float32)
    mean = np.cumsum(rounded, dtype=np.float32)[-1] / np.float32(len(rounded))
    squares = (rounded - mean) ** 2
    deviation = math.sqrt(np.cumsum(squares, dtype=np.float32)[-1] / len(rounded))
    threshold_32 = float(rounded.max()) - n * deviation
    scale = abs(float(logits.max())) + n * deviation + abs(float(mean))
    error = 2 * abs(threshold_32 - threshold) + sum_error(len(allowed)) * scale
    return Certain(logits > threshold + error, logits < threshold - error)


def certain_typical(logits: Logits, p: float) -> Certain:
    """A candidate is kept if the sum of the more typical ones is at most p.

    Rounding can change the sum and, if two candidates are nearly as typical, their order.
    """
    order = np.argsort(-logits, kind="stable")
    found = shares(logits[order])
    nats = -np.log(found.exact)
    entropy = math.fsum((found.exact * nats).tolist())
    nats_32 = -np.log(found.rounded)
    entropy_32 = float(np.cumsum(found.rounded * nats_32, dtype=np.float32)[-1])
    scores = np.abs(nats - entropy)
    errors = found.error + 4 * UNIT * (nats + entropy) + 2 * abs(entropy_32 - entropy) + sum_error(len(nats)) * entropy
    ranked = np.argsort(scores)
    sums = np.concatenate([[0.0], np.cumsum(found.exact[ranked])])
    lowest = sums[np.searchsorted(scores[ranked], scores - errors)]  # of the certainly more typical ones
    highest = sums[np.searchsorted(scores[ranked], scores + errors, side="right")] - found.exact
    slack = found.error + sum_error(len(nats)) + 2 * _sum_error_of(found.rounded[ranked], found.exact[ranked])
    kept, dropped = np.empty(len(order), np.bool_), np.empty(len(order), np.bool_)
    kept[order], dropped[order] = highest < p - slack, lowest > p + slack
    return Certain(kept, dropped)


def certain_xtc(logits: Logits, threshold: float) -> Certain:
    """If a candidate near the threshold is in doubt, the one that stays is in doubt, too."""
    order = np.argsort(-logits, kind="stable")
    found = shares(logits[order])
    p = np.empty(len(order))
    p[order] = found.exact
    top, maybe = p > threshold * (1 + found.error), p >= threshold * (1 - found.error)
    if np.array_equal(top, maybe):
        return certain_everything(len(p))
    least = np.zeros(len(p), np.bool_)
    if top.any():
        least[np.flatnonzero(top & (logits == logits[top].min()))] = True
    return Certain(~maybe, top & ~least)


def certain_mirostat_1(logits: Logits, mu: float) -> Certain | None:
    """A candidate is kept if it is one of the k likeliest, where k is that of the paper, with NumPy's functions.

    Returns None if k may exceed what libllama's int can hold.
    """
    if len(logits) < 2:
        return certain_everything(len(logits))
    top = -np.sort(-logits)[:100]
    ratios = np.log((np.arange(len(top) - 1) + 2) / (np.arange(len(top) - 1) + 1))
    s = float((ratios * (top[:-1] - top[1:])).sum() / (ratios * ratios).sum())
    with np.errstate(all="ignore"):
        log_k = (np.log((s - 1) / (1 - float(len(logits)) ** (1 - s))) + mu * math.log(2)) / np.float64(s)
        # An error of the logits changes s, and k is sensitive to s.
        error = 1e-4 * (1 + abs(log_k)) * (1 + 1 / np.float64(s)) * (1 + 1 / abs(np.float64(s - 1)))
        low, high = float(np.exp(log_k - error)), float(np.exp(log_k + error))
    if not (low < 2**31 and high < 2**31):
        return None
    ranks = np.argsort(np.argsort(-logits, kind="stable"))
    return Certain(ranks < max(int(low), 1), ranks >= max(int(high), 1))


def certain_mirostat_2(logits: Logits, mu: float) -> Certain:
    """A candidate is kept if its surprise is at most mu. If there is none, one of the likeliest is kept."""
    found = shares(logits)
    margin = mu * math.log(2) + np.log(np.maximum(found.exact, 1e-300))
    error = found.error + 8 * UNIT * (1 + abs(mu)) + 2 * UNIT * np.abs(margin)
    return Certain(margin > error, (margin < -error) & (logits < logits.max()))


def dynamic_temperatures(logits: Logits, temperature: float, spread: float, exponent: float) -> tuple[float, float]:
    """Return the lowest and the highest temperature that rounding errors allow."""
    found = shares(np.sort(logits)[::-1])
    possible = found.exact > 0
    entropy = math.fsum((found.exact[possible] * -np.log(found.exact[possible])).tolist())
    rounded = found.rounded[found.rounded > 0]
    entropy_32 = float(np.cumsum(-rounded * np.log(rounded), dtype=np.float32)[-1])
    error = 2 * abs(entropy_32 - entropy) + 2 * found.error * (entropy + 1)
    lowest, highest = max(0.0, temperature - spread), temperature + spread
    bounds = [max(0.0, entropy + sign * error) / math.log(len(logits)) for sign in (-1, 1)]
    low, high = (lowest + (highest - lowest) * share**exponent for share in bounds)
    return low * (1 - 8 * UNIT), high * (1 + 8 * UNIT)


def _by_sum(
    exact: NDArray[np.float64], rounded: NDArray[np.float32], error: float, p: float, order: NDArray[Any]
) -> Certain:
    """Return the certain decisions of candidates, given in their order, that are kept while a sum is below p."""
    before = np.concatenate([[0.0], np.cumsum(exact)[:-1]])
    slack = error + sum_error(len(exact)) + 2 * _sum_error_of(rounded, exact)
    kept, dropped = np.empty(len(order), np.bool_), np.empty(len(order), np.bool_)
    kept[order], dropped[order] = before < p - slack, before >= p + slack
    return Certain(kept, dropped)


def _sum_error_of(rounded: NDArray[np.float32], exact: NDArray[np.float64]) -> float:
    """Return the largest error of a partial sum in float32."""
    return float(np.abs(np.cumsum(rounded, dtype=np.float32) - np.cumsum(exact)).max())
