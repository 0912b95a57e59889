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


def test_text_after_images_has_the_rotations_of_its_positions() -> None:
    positions = np.arange(7, 12, dtype=np.int32)
    rope = Rope(inverse_powers(10_000.0, 8), axes=np.arange(8) % 3)
    found = Rotations([rope]).of(np.repeat(positions[:, None], 3, 1))
    np.testing.assert_array_equal(found, rotations_of([rope], positions))


def test_each_pair_of_an_image_rotates_with_its_axis() -> None:
    axes = np.array([0, 1, 2, 0, 2, 1, 1, 0])
    rope = Rope(inverse_powers(10_000.0, 8), axes=axes)
    found = Rotations([rope, ROPES[0]]).of(np.array([[3, 9, 4], [5, 5, 5]], np.int32))
    for pair, axis in enumerate(axes):
        expected = rope.rotations(np.array([(3, 9, 4)[axis], 5], np.int32))
        np.testing.assert_array_equal(found[:, pair], expected[:, pair])
    np.testing.assert_array_equal(found[:, 8:], ROPES[0].rotations(np.array([3, 5], np.int32)))  # not an M-RoPE
