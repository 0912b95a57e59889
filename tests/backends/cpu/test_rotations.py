"""Tests of the cache of rotations: steps of any size get what the ropes compute."""

from __future__ import annotations

import numpy as np
import pytest

from llmrun.backends.cpu import steps
from llmrun.backends.cpu.steps import Rotations
from llmrun.model.plan.elementary import Rope, inverse_powers, rotations_of

ROPES = [Rope(inverse_powers(10_000.0, 8)), Rope(inverse_powers(500.0, 4), magnitude=1.25)]


@pytest.mark.parametrize("ropes", [ROPES, ROPES[:1], []])
def test_the_cache_changes_nothing(ropes: list[Rope], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_MOST_BLOCKS", 3)
    cache, random = Rotations(ropes), np.random.default_rng(0)
    for count in (1, 5, 1, 64, 65, 200, 2, 1):
        positions = random.integers(0, 1000, count).astype(np.int32)
        found = cache.of(positions)
        np.testing.assert_array_equal(found, rotations_of(ropes, positions))
        assert found.flags.c_contiguous
        assert found.dtype == np.float32
        assert len(cache._blocks) <= 3
