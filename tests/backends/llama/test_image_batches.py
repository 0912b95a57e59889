"""Tests of the order in which rows of images run, of their positions, and of the checks of batches with images."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.backends.base import check_batch
from llmrun.backends.llama.kv_cache import is_whole
from llmrun.backends.llama.messages import CAUSAL_IMAGES, MROPE_CELL, TOKENS, WHOLE_IMAGE
from llmrun.backends.llama.positions import Positions
from llmrun.backends.llama.vision import image_groups
from llmrun.base.types import IMAGE_ROW, Batch
from tests.backends.llama.test_saved_header import saved

# The rows of a sequence: how many tokens or image rows follow each other, where images are negative
SEQUENCES = st.lists(st.lists(st.integers(-4, 4).filter(bool), max_size=4), min_size=1, max_size=3)


def batch_of(sequences: list[list[int]], *, whole: bool) -> Batch:
    """Return a batch in which sequences with these runs of rows follow each other."""
    tokens: list[int] = []
    seq: list[int] = []
    pos: list[int] = []
    ahead: list[int] = []
    for number, runs in enumerate(sequences):
        start = len(tokens)
        for run in runs:
            tokens += [IMAGE_ROW if run < 0 else 7] * abs(run)
            ahead += range(-run - 1, -1, -1) if run < 0 and whole else [0] * abs(run)
        seq += [number] * (len(tokens) - start)
        pos += range(len(tokens) - start)
    count = tokens.count(IMAGE_ROW)
    return Batch(
        np.array(tokens, np.int32),
        np.array(seq, np.int32),
        np.array(pos, np.int32),
        np.zeros(len(tokens), np.uint8),
        embeds=np.zeros((count, 2), np.float32) if count else None,
        ahead=np.array(ahead, np.int32) if whole else None,
    )


@given(SEQUENCES, st.booleans())
def test_every_row_runs_once_and_in_order(sequences: list[list[int]], whole: bool) -> None:
    batch = batch_of(sequences, whole=whole)
    reached = dict.fromkeys(range(len(sequences)), 0)
    for kind, rows in image_groups(batch, 10):
        assert set(batch.tokens[rows] == IMAGE_ROW) == {kind != TOKENS} or not len(rows)
        for row in rows:
            assert batch.pos[row] == reached[batch.seq[row]]
            reached[batch.seq[row]] += 1
        if kind == WHOLE_IMAGE:
            assert batch.ahead is not None
            assert batch.ahead[rows].tolist() == list(range(len(rows)))[::-1]
    assert sum(reached.values()) == len(batch.tokens)


def test_texts_of_several_sequences_run_together() -> None:
    groups = [(kind, len(rows)) for kind, rows in image_groups(batch_of([[3, -2, 1], [2, -4], [1]], whole=False), 10)]
    assert groups == [(TOKENS, 6), (CAUSAL_IMAGES, 6), (TOKENS, 1)]


def test_images_with_a_two_way_mask_run_alone() -> None:
    batch = batch_of([[3, -2, 1], [2, -4, -3]], whole=True)
    groups = [(kind, len(rows)) for kind, rows in image_groups(batch, 10)]
    assert groups == [(TOKENS, 5), (WHOLE_IMAGE, 2), (WHOLE_IMAGE, 4), (WHOLE_IMAGE, 3), (TOKENS, 1)]
    with pytest.raises(ValueError, match="an image of 4 rows, the limit is 3"):
        list(image_groups(batch, 3))


WIDTH = 2
INFO: Any = SimpleNamespace(
    vocabulary_size=100, max_sequences=2, context_size=100, adapters=(), has_logits=True, hidden_size=0, backend="test"
)


def check(batch: Batch, row_width: int = WIDTH) -> None:
    check_batch(batch, INFO, [0, 0], row_width)


@pytest.mark.parametrize("whole", [False, True])
def test_rows_of_images_are_checked(whole: bool) -> None:
    batch = batch_of([[3, -2, 1], [2, -4]], whole=whole)
    assert batch.embeds is not None
    check(batch)
    with pytest.raises(ValueError, match="this backend takes no rows of images"):
        check(batch, 0)
    with pytest.raises(ValueError, match="token ids must be 0 to 99"):
        check(replace(batch, embeds=None))
    for embeds in (batch.embeds[1:], np.zeros((6, WIDTH + 1), np.float32), batch.embeds[0]):
        with pytest.raises(ValueError, match="embeddings must be 6 x 2 numbers"):
            check(replace(batch, embeds=embeds))
    for tokens in (batch.tokens - 1, np.where(batch.tokens == IMAGE_ROW, IMAGE_ROW, 100)):
        with pytest.raises(ValueError, match=r"must be"):
            check(replace(batch, tokens=tokens))
    with pytest.raises(ValueError, match="at least one row"):
        check(replace(batch_of([[3]], whole=whole), embeds=np.zeros((0, WIDTH), np.float32)))


def test_rows_attend_only_within_their_image() -> None:
    batch = batch_of([[3, -2, 1], [2, -4]], whole=True)
    assert batch.ahead is not None
    for row, value in [(2, 1), (3, 2), (3, -1), (4, 1), (5, 1), (8, 2), (8, 4), (10, 0), (11, 1)]:
        ahead = batch.ahead.copy()
        ahead[row] = value
        with pytest.raises(ValueError, match="attend"):
            check(replace(batch, ahead=ahead))
    with pytest.raises(ValueError, match="attend"):
        check(replace(batch, ahead=batch.ahead[:-1]))


def test_rope_positions_are_checked() -> None:
    batch = batch_of([[3, -4, 1]], whole=False)
    rope = np.array([[0] * 3, [1] * 3, [2] * 3, [3, 3, 3], [3, 3, 4], [3, 4, 3], [3, 4, 4], [5] * 3], np.int32)
    check(replace(batch, rope_pos=rope))
    for wrong in (rope[:-1], rope[:, :2], rope - 1, rope + 4):
        with pytest.raises(ValueError, match="RoPE positions must be 8 x 3 numbers"):
            check(replace(batch, rope_pos=wrong))


# Images of 2 x 2 rows, which take two positions, between texts
TIMES = [0, 1, 2, 2, 2, 2, 4, 5, 5, 5, 5, 7]


def test_rows_of_an_image_stay_together() -> None:
    positions = Positions(2, images=True)
    positions.add([1] * len(TIMES), TIMES)
    borders = [positions.border(1, n) for n in range(len(TIMES) + 1)]
    assert borders == [0, 1, 2, 2, 2, 2, 6, 7, 7, 7, 7, 11, 12]
    assert [positions.end(1, n) for n in borders] == [0, 1, 2, 2, 2, 2, 3, 5, 5, 5, 5, 6, 8]
    assert [positions.rows_before(1, at) for at in (0, 2, 3, 4, 5, 8)] == [0, 2, 6, 6, 7, 12]
    positions.copy(1, 0, 6)
    positions.truncate(1, 3)
    assert (positions.end(0, 6), positions.border(0, 5), positions.border(1, 3)) == (3, 2, 3)


def test_without_images_positions_are_numbers_of_rows() -> None:
    positions = Positions(1, images=False)
    positions.add([0, 0], [0, 1])
    assert [f(0, 5) for f in (positions.end, positions.border, positions.rows_before)] == [5, 5, 5]


@given(st.permutations(TIMES))
def test_saved_sequences_can_have_images(times: list[int]) -> None:
    data = saved(times, words=MROPE_CELL)
    assert is_whole(data, 12, MROPE_CELL, images=True)
    assert not is_whole(data, 12, MROPE_CELL)
    assert not is_whole(data, 11, MROPE_CELL, images=True)
    positions = Positions(1, images=True)
    positions.load(0, bytearray(data), 12)
    assert [positions.end(0, n + 1) - 1 for n in range(12)] == TIMES


@pytest.mark.parametrize("times", [[0, 1, -1], [0, 2, 2], [1, 1, 2], [0, 1, 3]])
def test_positions_that_no_images_have_are_refused(times: list[int]) -> None:
    assert not is_whole(saved(times, words=MROPE_CELL), 3, MROPE_CELL, images=True)
