"""Logarithms, powers and probabilities with the same bits on every machine.

The last bit of math.log and math.exp depends on the C library. These functions use only operations whose rounding
IEEE 754 defines, and sums in a fixed order. Samplers never need the logarithm of an array: the logarithm of a
probability is its logit minus a number that all candidates share.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmrun.engine.sampling import LARGEST, exp, ordered_sum
from llmrun.formats.layouts.sampling import LN2_HIGH, LN2_LOW

if TYPE_CHECKING:
    from numpy.typing import NDArray

LN2 = LN2_HIGH + LN2_LOW
_SQRT_HALF = 0.7071067811865476
_LOG_TERMS = tuple(2 / n for n in range(23, 0, -2))


class Softmax(NamedTuple):
    """The probabilities of candidates.

    weights  exp(logit - largest logit)
    total    their sum
    nats     the negative natural logarithms of the probabilities; inf for tokens that cannot be drawn
    """

    weights: NDArray[np.float64]
    total: float
    nats: NDArray[np.float64]

    @property
    def entropy(self) -> float:
        """The entropy in nats."""
        possible = self.weights > 0
        return ordered_sum(self.weights[possible] * self.nats[possible]) / self.total


def softmax(logits: NDArray[np.float64]) -> Softmax:
    """Return the probabilities of candidates with these logits."""
    below = logits.max() - logits
    weights = exp(-below)
    total = ordered_sum(weights)
    return Softmax(weights, total, np.where(weights > 0, below + log(total), np.inf))


def is_banned(logits: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which tokens are banned: those with a logit of -inf, or of -LARGEST after the penalties."""
    return logits <= -LARGEST


def log(x: float) -> float:
    """Return the natural logarithm of a positive float64, with an error of at most 2 units in the last place.

    x is m * 2^n, with m between sqrt(1/2) and sqrt(2), and log(m) is 2 atanh(s) with s = (m - 1) / (m + 1), as a series
    in odd powers of s. |s| is at most 0.172, so that the first term left out is below 2^-66 of the result.
    """
    m, n = math.frexp(x)
    if m < _SQRT_HALF:
        m, n = 2 * m, n - 1
    s = (m - 1) / (m + 1)
    square, series = s * s, 0.0
    for term in _LOG_TERMS:
        series = series * square + term
    return n * LN2_HIGH + (s * series + n * LN2_LOW)


def exp_of(x: float) -> float:
    """Return e^x, which is 0 below -700 and inf above 700."""
    value = float(exp(np.array([-abs(x)]))[0])
    if x <= 0:
        return value
    return 1 / value if value else math.inf


def integer_power(base: float, exponent: int) -> float:
    """Return base^exponent for an exponent of at least 0, by repeated squaring."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base, exponent = base * base, exponent >> 1
    return result
