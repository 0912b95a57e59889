"""Tests of attention with a sliding window, capped scores or sinks, against NumPy at every instruction level."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.formats.layouts.kv import BLOCK
from llmrun.model.plan.shapes import AttentionShape
from tests.kernels.attention.test_attention import EVERY_LEVEL, EVERY_SHAPE, EVERY_TYPE, NINE, SIX, Cache, filled

pytestmark = pytest.mark.push

WINDOWS = (1, 2, 3, 16, 31, 32, 33, 100, 128, 129, 250, 1000)
LENGTHS = np.array([1, 2, 17, 32, 33, 48, 100, 127, 128, 129, 160, 161, 256, 257, 300], np.int32)
FAR = np.concatenate([np.arange(0, 20), np.arange(110, 150), np.arange(240, 261), [299]]).astype(np.int32)


def random_rows(rows: int, heads: int, head_size: int) -> NDArray[np.float32]:
    return 3 * np.random.default_rng(rows).standard_normal((rows, heads, head_size)).astype(np.float32)


def seen_by(position: int, window: int) -> slice:
    return slice(max(0, position + 1 - window), position + 1)


def put_nan(cache: Cache, positions: NDArray[np.int32], level: str) -> None:
    shape = cache.shape
    assert shape.value_size == shape.head_size
    nan = np.full((len(positions), shape.kv_heads, shape.head_size), np.nan, np.float32)
    q = np.zeros((len(positions), shape.heads, shape.head_size), np.float32)
    cache.store(q, nan, nan, positions, level=level)


@EVERY_SHAPE
def test_attention_to_a_window_is_near_its_twin(level: str, shape: AttentionShape, kv_type: str) -> None:
    """Allow an error of 2e-6 of the largest value, wherever the window begins within a block and a chunk."""
    cache = filled(shape, 300, kv_type, level=level)
    q = random_rows(len(LENGTHS), shape.heads, shape.head_size)
    for window in WINDOWS:
        actual = cache.attend(q, LENGTHS - 1, level=level, threads=2, window=window)
        cache.check(actual, q, [seen_by(length - 1, window) for length in LENGTHS])


@pytest.mark.cover(1)
@EVERY_SHAPE
@pytest.mark.parametrize("window", [1, 5, 33, 128, 200])
def test_rows_of_a_tile_with_windows_of_their_own_equal_the_rows_one_by_one(
    level: str, shape: AttentionShape, kv_type: str, window: int
) -> None:
    """The bits must be equal for any number of threads, across block and chunk boundaries."""
    cache = filled(shape, 300, kv_type, level=level)
    q = random_rows(len(FAR), shape.heads, shape.head_size)
    sinks = np.linspace(-4, 4, shape.heads, dtype=np.float32)
    together = cache.attend(q, FAR, level=level, threads=3, window=window, sinks=sinks)
    for row in range(0, len(FAR), 1 + window % 2):
        alone = cache.attend(
            q[row : row + 1], FAR[row : row + 1], level=level, threads=1 + row % 2, window=window, sinks=sinks
        )
        np.testing.assert_array_equal(alone[0], together[row])


@EVERY_LEVEL
@EVERY_TYPE
@pytest.mark.parametrize("window", [1, 20, 33, 128, 150])
def test_what_lies_before_every_window_is_not_read(level: str, kv_type: str, window: int) -> None:
    """Table entries of released blocks may point anywhere; here they point to a block of NaN. The part of a block
    before the first window may hold NaN too.
    """
    cache = filled(NINE, 300, kv_type, level=level)
    positions = np.arange(270, 300, dtype=np.int32)
    q = random_rows(len(positions), 9, 64)
    clean = cache.attend(q, positions, level=level, window=window)
    first = 271 - window
    put_nan(cache, np.arange(first, dtype=np.int32), level)
    cache.table[: first // BLOCK] = cache.table[0] if first >= BLOCK else 0
    np.testing.assert_array_equal(cache.attend(q, positions, level=level, window=window), clean)
    for row in range(0, 30, 7):
        alone = cache.attend(q[row : row + 1], positions[row : row + 1], level=level, window=window)
        np.testing.assert_array_equal(alone[0], clean[row])


@EVERY_LEVEL
@EVERY_TYPE
def test_a_nan_is_seen_by_the_rows_in_whose_window_it_is(level: str, kv_type: str) -> None:
    """No other row of the tile sees it."""
    cache = filled(NINE, 80, kv_type, level=level)
    put_nan(cache, np.array([50], np.int32), level)
    positions = np.arange(44, 76, dtype=np.int32)
    for window in (1, 4, 11, 20):
        seen = np.isnan(cache.attend(random_rows(32, 9, 64), positions, level=level, window=window)).any((1, 2))
        assert positions[seen].tolist() == list(range(50, 50 + window))


@EVERY_LEVEL
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize(("cap", "kv_type"), [(0.5, "f16"), (30.0, "f16"), (0.5, "q8_0"), (30.0, "q8_0")])
def test_capped_attention_is_near_its_twin(level: str, window: int, cap: float, kv_type: str) -> None:
    cache = filled(SIX, 300, kv_type, level=level)
    q = random_rows(len(LENGTHS), 6, 48)
    sinks = np.linspace(-4, 4, 6, dtype=np.float32)
    for heads_sinks in (None, sinks):
        actual = cache.attend(q, LENGTHS - 1, level=level, threads=2, window=window, soft_cap=cap, sinks=heads_sinks)
        seen = [seen_by(length - 1, window or length) for length in LENGTHS]
        cache.check(actual, q, seen, 4e-6, soft_cap=cap, sinks=heads_sinks)


@EVERY_LEVEL
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_capped_rows_of_a_tile_equal_the_rows_one_by_one(level: str, kv_type: str) -> None:
    cache = filled(SIX, 300, kv_type, level=level)
    q = random_rows(len(FAR), 6, 48)
    together = cache.attend(q, FAR, level=level, threads=3, window=90, soft_cap=2.0)
    for row in range(len(FAR)):
        alone = cache.attend(q[row : row + 1], FAR[row : row + 1], level=level, window=90, soft_cap=2.0)
        np.testing.assert_array_equal(alone[0], together[row])


@EVERY_SHAPE
def test_attention_with_sinks_is_near_its_twin(level: str, shape: AttentionShape, kv_type: str) -> None:
    """Covers sinks below, among and above the scores. The largest sinks take nearly all of the weight."""
    cache = filled(shape, 300, kv_type, level=level)
    q = random_rows(len(LENGTHS), shape.heads, shape.head_size)
    for sinks in (np.linspace(-30, 30, shape.heads, dtype=np.float32), np.full(shape.heads, 2, np.float32)):
        actual = cache.attend(q, LENGTHS - 1, level=level, threads=2, sinks=sinks)
        cache.check(actual, q, [slice(0, length) for length in LENGTHS], sinks=sinks)


@EVERY_LEVEL
def test_a_sink_far_below_all_scores_changes_nothing(level: str) -> None:
    cache = filled(NINE, 300, "f16", level=level)
    q = random_rows(len(FAR), 9, 64)
    without = cache.attend(q, FAR, level=level)
    for sink in (-1e9, -np.inf):
        sinks = np.full(9, sink, np.float32)
        np.testing.assert_allclose(cache.attend(q, FAR, level=level, sinks=sinks), without, rtol=1e-6, atol=0)
