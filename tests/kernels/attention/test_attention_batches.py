"""Tests of attention in steps of several rows and sequences, which must equal the rows one by one, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmrun.formats.layouts.arena import address_of
from llmrun.formats.layouts.kv import (
    BLOCK,
    CHUNK,
    F16,
    KV_TYPES,
    Q8_0,
    SHARING_ROWS,
    SPLIT_ROWS,
    HeadLayout,
    KVType,
    state_floats,
    tile_shape,
)
from llmrun.model.plan.shapes import AttentionShape, Reach
from tests.kernels.attention.test_attention import EVERY_LEVEL, EVERY_TYPE, MANY, NINE, OWN, SIX, Cache, filled
from tests.support.kernels.runs import LEVELS_HERE
from tests.support.tiers import examples

BLOCKS = 48  # in the cache of these tests
TABLE = 13  # blocks per sequence: three chunks and a bit
ROWS = st.lists(
    st.tuples(
        st.integers(0, TABLE),  # blocks shared with the sequence before
        st.integers(1, TABLE * BLOCK),  # length
        st.integers(1, 6),  # rows
    ),
    min_size=1,
    max_size=12,
)


class Sequences(Cache):
    """A cache that several sequences use. Their block tables may share blocks.

    tables  int32[sequences, TABLE]
    slots   the number of slots for partial results; with few of them, a step is not split over chunks
    """

    def __init__(self, filled_cache: Cache, tables: NDArray[np.int32], slots: int = SPLIT_ROWS * TABLE) -> None:
        self.shape, self.keys, self.values = filled_cache.shape, filled_cache.keys, filled_cache.values
        self.block_bytes = filled_cache.block_bytes
        self.memory, self.tables, self.slots = filled_cache.memory, tables, slots

    def attend_rows(
        self,
        q: NDArray[np.float32],
        sequences: Sequence[int],
        positions: NDArray[np.int32],
        *,
        level: str,
        threads: int = 1,
        **more: Any,
    ) -> NDArray[np.float32]:
        self.sequences = sequences
        self.table = self.tables[sequences[0]]
        return self.attend(q, positions, level=level, threads=threads, **more)

    def step(self, positions: NDArray[np.int32], rotations: NDArray[np.float32], reach: Reach = OWN) -> dict[int, int]:
        step = super().step(positions, rotations, reach)
        self._tables[1] = [address_of(self.tables[sequence]) for sequence in self.sequences]
        return step

    def partials(self) -> NDArray[np.float32]:
        return np.full((self.slots, self.shape.heads * state_floats(self.shape.value_size)), np.nan, np.float32)


@cache
def filled_once(shape: AttentionShape, kv_type: str) -> Cache:
    return filled(shape, BLOCKS * BLOCK, kv_type, level=LEVELS_HERE[0])


def tables_of(shared: Sequence[int], seed: int) -> NDArray[np.int32]:
    """Return random block tables, each of which begins with the same blocks as the one before it."""
    tables = np.random.default_rng(seed).integers(0, BLOCKS, (len(shared), TABLE)).astype(np.int32)
    for sequence, n in enumerate(shared[1:], 1):
        tables[sequence, :n] = tables[sequence - 1, :n]
    return tables


def ragged(rows: Sequence[tuple[int, int, int]]) -> tuple[list[int], NDArray[np.int32]]:
    """Return the sequence and the position of each row of a step. Each sequence has its last few positions."""
    sequences = [sequence for sequence, (_, length, count) in enumerate(rows) for _ in range(min(count, length))]
    positions = [np.arange(length - min(count, length), length) for _, length, count in rows]
    return sequences[: SPLIT_ROWS + 8], np.concatenate(positions)[: SPLIT_ROWS + 8].astype(np.int32)


@pytest.mark.push
@settings(max_examples=examples(60), deadline=None)
@given(
    rows=ROWS,
    seed=st.integers(0, 1000),
    shape=st.sampled_from([NINE, SIX, MANY]),
    kv_type=st.sampled_from(list(KV_TYPES)),
    window=st.sampled_from([0, 0, 1, 20, 100, CHUNK, 130, 300]),
    has_sinks=st.booleans(),
    threads=st.integers(1, 4),
    slots=st.sampled_from([1, 20, SPLIT_ROWS * TABLE]),
)
@pytest.mark.parametrize("level", LEVELS_HERE)
def test_a_ragged_step_equals_its_rows(
    level: str,
    rows: list[tuple[int, int, int]],
    seed: int,
    shape: AttentionShape,
    kv_type: str,
    window: int,
    has_sinks: bool,
    threads: int,
    slots: int,
) -> None:
    tables = tables_of([shared for shared, _, _ in rows], seed)
    sequences, positions = ragged(rows)
    drawn = np.random.default_rng(seed).standard_normal((len(positions), shape.heads, shape.head_size))
    q = 3 * drawn.astype(np.float32)
    sinks = np.linspace(-4, 4, shape.heads, dtype=np.float32) if has_sinks else None
    together = Sequences(filled_once(shape, kv_type), tables, slots).attend_rows(
        q, sequences, positions, level=level, threads=threads, window=window, sinks=sinks
    )
    alone = Sequences(filled_once(shape, kv_type), tables)
    for row in range(len(positions)):
        part = slice(row, row + 1)
        one = alone.attend_rows(q[part], sequences[part], positions[part], level=level, window=window, sinks=sinks)
        np.testing.assert_array_equal(one[0], together[row])


@pytest.mark.push
@EVERY_LEVEL
@EVERY_TYPE
@pytest.mark.parametrize("count", [2, 3, 5, 8, 16])
def test_sequences_with_a_shared_prefix_are_near_the_twin(level: str, kv_type: str, count: int) -> None:
    """The sequences share ten blocks and continue with blocks of their own. Allow 2e-6 of the largest value."""
    tables = tables_of([0, *[10] * (count - 1)], count)
    positions = (TABLE * BLOCK - 1 - np.arange(count)).astype(np.int32)
    q = 3 * np.random.default_rng(count).standard_normal((count, 9, 64)).astype(np.float32)
    found = filled_once(NINE, kv_type)
    actual = Sequences(found, tables).attend_rows(q, range(count), positions, level=level, threads=2)
    alone = Sequences(found, tables)
    for row, position in enumerate(positions):
        alone.table = tables[row]
        alone.check(actual[row : row + 1], q[row : row + 1], [slice(0, position + 1)])


@pytest.mark.push
@EVERY_LEVEL
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_capped_sequences_equal_the_rows_alone(level: str, kv_type: str) -> None:
    tables = tables_of([0, 12, 9, 13, 4], 5)
    sequences, positions = ragged([(0, 400, 3), (0, 390, 1), (0, 410, 4), (0, 416, 1), (0, 140, 2)])
    q = 3 * np.random.default_rng(1).standard_normal((len(positions), 6, 48)).astype(np.float32)
    cache_ = Sequences(filled_once(SIX, kv_type), tables)
    together = cache_.attend_rows(q, sequences, positions, level=level, threads=3, window=300, soft_cap=2.0)
    for row in range(len(positions)):
        part = slice(row, row + 1)
        alone = cache_.attend_rows(q[part], sequences[part], positions[part], level=level, window=300, soft_cap=2.0)
        np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.push
@EVERY_LEVEL
def test_a_row_does_not_see_what_only_its_neighbour_sees(level: str) -> None:
    """Two sequences share a block, and the longer one has stored a NaN after the end of the shorter one."""
    cache_ = Sequences(filled(NINE, BLOCKS * BLOCK, "f16", level=level), tables_of([0, TABLE], 3))
    halves = cache_.memory.view(np.float16).reshape(BLOCKS, 3, 2, -1)
    values = halves[cache_.tables[0, 3], :, 1].reshape(3, BLOCK, 64)
    values[:, 20] = np.nan
    q = np.random.default_rng(2).standard_normal((2, 9, 64)).astype(np.float32)
    for lengths, sees in (([116, 117], [False, True]), ([128, 116], [True, False]), ([117, 250], [True, True])):
        seen = cache_.attend_rows(q, [0, 1], np.array(lengths, np.int32) - 1, level=level)
        assert np.isnan(seen).any((1, 2)).tolist() == sees


@pytest.mark.push
@EVERY_LEVEL
def test_blocks_after_the_end_of_a_row_are_not_compared(level: str) -> None:
    """All tables agree on the first block. The first two rows end there, and entries after the end are out of date."""
    tables = tables_of([0, 1, *[TABLE] * 6], 7)
    positions = np.array([19, 19, 127, 127, 127, 127, 20, 127], np.int32)
    q = np.random.default_rng(4).standard_normal((8, 6, 48)).astype(np.float32)
    cache_ = Sequences(filled_once(SIX, "f16"), tables)
    together = cache_.attend_rows(q, range(8), positions, level=level, threads=2)
    for row in range(8):
        alone = cache_.attend_rows(q[row : row + 1], [row], positions[row : row + 1], level=level)
        np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.parametrize(
    ("level", "kind", "most"),
    [("avx512vnni", F16, 8), ("avx2", F16, 6), ("avx512vnni", Q8_0, 12), ("avx2", Q8_0, 4), ("neondot", Q8_0, 6)],
)
def test_tiles_cover_all_heads_of_a_group(level: str, kind: KVType, most: int) -> None:
    for group in range(1, 130):
        heads, rows, tiles = tile_shape(level, HeadLayout(kind, kind, 64, 64), group)
        assert 1 <= rows * heads <= most
        assert rows <= SHARING_ROWS
        assert heads <= group <= heads * tiles < group + heads
