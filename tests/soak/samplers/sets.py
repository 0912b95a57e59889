"""Compares the candidates that our samplers and libllama's keep, and their logits.

The sets must be equal, except in two cases, which are counted:

- tie: the kept logits are equal, but some ids with equal logits are exchanged, because libllama's sorts are not stable
- rounding: a candidate is closer to the boundary than the errors of float32 (tests/support/engine/float32_bounds.py)

Logits that a sampler changes must be equal within such errors.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from tests.soak.driver import Broken
from tests.support.engine.float32_bounds import Certain
from tests.support.models.llama_samplers import Applied

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.engine.sampling import Candidates

EQUAL, TIE, ROUNDING, UNDEFINED = "equal", "tie", "rounding", "undefined in C++"


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
