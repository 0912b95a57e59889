"""Tests of attention without a causal mask, against NumPy and between batches, at every instruction level."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmrun.formats.layouts.kv import BLOCK
from llmrun.model.plan.shapes import ALL, AttentionShape, Reach, seen_ranges
from tests.kernels.attention.test_attention import EVERY_LEVEL, NINE, SIX, filled
from tests.kernels.attention.test_attention_batches import BLOCKS, TABLE, Sequences, filled_once, tables_of
from tests.support.kernels.runs import LEVELS_HERE
from tests.support.tiers import examples

LENGTHS = (1, 16, 33, 129, 300)


def queries(rows: int, shape: AttentionShape) -> NDArray[np.float32]:
    drawn = np.random.default_rng(rows).standard_normal((rows, shape.heads, shape.head_size))
    return 3 * drawn.astype(np.float32)


@pytest.mark.push
@EVERY_LEVEL
@pytest.mark.parametrize(("shape", "kv_type"), [(NINE, "f16"), (SIX, "q8_0")])
@pytest.mark.parametrize("around", [ALL, 3, 130])
def test_rows_see_both_ways_like_the_twin(level: str, shape: AttentionShape, kv_type: str, around: int) -> None:
    """Allow an error of 2e-6 of the largest value, in steps that are split over chunks and in others."""
    cache = filled(shape, 300, kv_type, level=level)
    for length in LENGTHS:
        positions, q = np.arange(length, dtype=np.int32), queries(length, shape)
        actual = cache.attend(q, positions, level=level, threads=2, around=around)
        cache.check(actual, q, [Reach(around, around).seen_from(row, length) for row in range(length)])


@pytest.mark.push
@settings(max_examples=examples(40), deadline=None)
@given(
    lengths=st.lists(st.integers(1, TABLE * BLOCK), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    kind=st.sampled_from([(NINE, "f16"), (SIX, "q8_0")]),
    around=st.sampled_from([ALL, 1, 40, 128]),
    threads=st.integers(1, 4),
)
@pytest.mark.parametrize("level", LEVELS_HERE)
def test_a_sequence_has_the_same_bits_in_any_step(
    level: str, lengths: list[int], seed: int, kind: tuple[AttentionShape, str], around: int, threads: int
) -> None:
    shape, kv_type = kind
    tables = tables_of([0] * len(lengths), seed)
    sequences = [sequence for sequence, length in enumerate(lengths) for _ in range(length)]
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    q = queries(len(positions), shape)
    cache = Sequences(filled_once(shape, kv_type), tables)
    together = cache.attend_rows(q, sequences, positions, level=level, threads=threads, around=around)
    end = 0
    for sequence, length in enumerate(lengths):
        rows, end = slice(end, end + length), end + length
        alone = cache.attend_rows(q[rows], [sequence] * length, positions[rows], level=level, around=around)
        np.testing.assert_array_equal(alone, together[rows])


@pytest.mark.push
@EVERY_LEVEL
@pytest.mark.parametrize("length", [20, 40])
def test_what_another_text_left_after_the_end_is_not_read(level: str, length: int) -> None:
    cache = filled(NINE, BLOCKS * BLOCK, "f16", level=level)
    positions, q = np.arange(length, dtype=np.int32), queries(length, NINE)
    clean = cache.attend(q, positions, level=level, around=ALL)
    nan = np.full((80 - length, 3, 64), np.nan, np.float32)
    later = np.arange(length, 80, dtype=np.int32)
    cache.store(np.zeros((80 - length, 9, 64), np.float32), nan, nan, later, level=level)
    np.testing.assert_array_equal(cache.attend(q, positions, level=level, around=ALL), clean)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    reaches=st.lists(st.tuples(st.sampled_from([0, 1, 4, ALL]), st.sampled_from([0, 1, 4, ALL])), max_size=3),
)
def test_ranges_are_those_of_each_row(lengths: list[int], reaches: list[tuple[int, int]]) -> None:
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    sequences = np.repeat(np.arange(len(lengths))[::-1] * 7, lengths)
    ranges = seen_ranges([Reach(*reach) for reach in reaches], positions, sequences)
    ends = np.repeat(lengths, lengths)
    expected = [
        [(max(0, at - back), min(at + ahead + 1, end)) for at, end in zip(positions, ends, strict=True)]
        for back, ahead in reaches
    ]
    np.testing.assert_array_equal(ranges, np.array(expected).reshape(ranges.shape))


def test_images_extend_what_their_rows_see() -> None:
    positions, ahead = np.array([4, 5, 6, 7, 0], np.int32), np.array([0, 2, 1, 0, 0], np.int32)
    looks_ahead = np.array([[1], [0]], np.int32)
    ranges = seen_ranges([Reach(ALL, 0), Reach(1, 0)], positions, np.array([0, 0, 0, 0, 1]), looks_ahead * ahead)
    assert ranges[0].tolist() == [[0, 5], [0, 8], [0, 8], [0, 8], [0, 1]]
    assert ranges[1].tolist() == [[3, 5], [4, 6], [5, 7], [6, 8], [0, 1]]
