"""Compare our samplers with libllama's for 100,000 arrays of logits, like scripts/soak_samplers."""

from __future__ import annotations

import pytest

from tests.soak.samplers.sets import ROUNDING
from tests.soak.samplers.soak import KINDS, Tally, compare_many


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_candidates_are_kept_for_many_logits(kind: str) -> None:
    tally = Tally()
    assert list(compare_many(kind, -(-100_000 // len(KINDS)), 1, tally)) == []
    assert tally.count(ROUNDING) <= 0.02 * tally.arrays
