"""Random logits for comparing samplers with libllama's, and the comparison of the candidates that both keep.

The sets must be equal, except in two cases, which are counted:

- tie: the kept logits are equal, but some ids with equal logits are exchanged, because libllama's sorts are not stable
- rounding: a candidate is closer to the boundary than the errors of float32 (tests/support/engine/float32_bounds.py)

Logits that a sampler changes must be equal within such errors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from llmrun.engine.samplers.base import Place
from llmrun.engine.samplers.breakers import NO_BREAKERS, Breakers
from llmrun.sampling_params import SamplingParams
from tests.soak.driver import Broken
from tests.support.engine.float32_bounds import Certain
from tests.support.models.llama_samplers import Applied

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.engine.sampling import Candidates

OFF = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
EQUAL, TIE, ROUNDING = "equal", "tie", "rounding"


class Case:
    """A case, which is determined by seed and number."""

    def __init__(self, seed: int, number: int, *, largest: int = 152_000) -> None:
        self.random = np.random.default_rng([seed, number])
        self._largest = largest

    def one_of(self, *values: Any) -> Any:
        return values[int(self.random.integers(len(values)))]

    def between(self, low: float, high: float) -> float:
        """Return a number that float32 represents exactly, so that libllama gets the same one."""
        return float(np.float32(self.random.uniform(low, high)))

    def size(self) -> int:
        kind = self.random.random()
        if kind < 0.02:
            return int(self.random.integers(self._largest // 4, self._largest))
        return int(self.random.integers(1, self.one_of(4, 40, 140, 1100, 1100, 5000)))

    def logits(self, n: int, *, narrowest: float = 0.05, widest: float = 200.0) -> NDArray[np.float32]:
        """Return logits of one of many distributions, some of them with ties, that differ by at most `widest`."""
        random, width = self.random, float(np.exp(self.random.uniform(math.log(narrowest), 2.3)))
        values: NDArray[np.float64] = self.one_of(
            lambda: random.normal(0, width, n),
            lambda: random.uniform(-width, width, n),
            lambda: -width * np.log(random.permutation(n) + 1.0),
            lambda: np.where(random.random(n) < 0.01, 5 * width, random.normal(0, width, n)),
            lambda: random.exponential(width, n),
            lambda: np.full(n, width),
            lambda: random.choice(random.normal(0, width, 5), n),
        )()
        if random.random() < 0.25:
            values = values.round(self.one_of(0, 1, 2))
        values = values + self.one_of(0.0, 0.0, 12.0, -30.0)
        raised: NDArray[np.float32] = np.maximum(values, values.max() - widest).astype(np.float32)
        return raised

    def candidates(self, *, bans: bool = True, widest: float = 200.0) -> tuple[Candidates, bool]:
        """Return candidates as in a chain: all tokens by id, some of them sorted, or some in any order.

        The second value says whether libllama may take them as sorted.
        """
        n = self.size()
        logits = self.logits(n, widest=widest)
        if bans and n > 1 and self.random.random() < 0.15:
            logits[self.random.permutation(n)[: self.random.integers(n)]] = -np.inf
        ids = np.arange(n)
        order = self.one_of("ids", "sorted", "any")
        if order == "sorted":
            ids = np.argsort(-logits, kind="stable")[: self.random.integers(1, n + 1)]
        if order == "any":
            ids = self.random.permutation(n)[: self.random.integers(1, n + 1)]
            ids = ids if np.isfinite(logits[ids]).any() else np.arange(n)
        return (ids.astype(np.intp), logits[ids].astype(np.float64)), order == "sorted"


def place(
    params: SamplingParams, vocabulary: int, history: Sequence[int] = (), breakers: Breakers = NO_BREAKERS
) -> Place:
    return Place(history, params, len(history), vocabulary, breakers)


class Different(Broken):
    """A difference that neither a tie nor rounding explains."""


def compare_sets(given: Candidates, ours: Candidates, theirs: Applied, certain: Certain) -> str:
    """Compare the candidates that were kept. Candidates with logits of -inf do not count."""
    ids, logits = given
    kept = np.isin(ids, ours[0][ours[1] > -np.inf])
    kept_there = np.isin(ids, theirs.ids[theirs.logits > -np.inf])
    if np.array_equal(kept, kept_there):
        return EQUAL
    counts, counts_there = Counter(logits[kept].tolist()), Counter(logits[kept_there].tolist())
    if counts == counts_there:
        return TIE
    doubtful = ~certain.kept & ~certain.dropped
    for value in counts.keys() | counts_there.keys():
        # Of equal logits, any may be the one that libllama keeps.
        if counts[value] != counts_there[value] and not doubtful[logits == value].any():
            raise Different(f"{counts[value]} logits of {value}, libllama keeps {counts_there[value]}")
    return ROUNDING


def compare_logits(ours: Candidates, theirs: Applied, errors: NDArray[np.float64] | float) -> str:
    """Compare the logits by id. Those below -3e38 are equal, because libllama's may overflow to -inf."""
    by_id = dict(zip(theirs.ids.tolist(), theirs.logits.tolist(), strict=True))
    expected = np.array([by_id[token] for token in ours[0].tolist()])
    lowest = (ours[1] < -3e38) & (expected < -3e38)
    with np.errstate(invalid="ignore"):
        wrong = ~(np.abs(ours[1] - expected) <= errors) & ~lowest
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise Different(f"logit of {ours[0][at]}: ours {ours[1][at]}, libllama's {expected[at]}")
    return EQUAL
