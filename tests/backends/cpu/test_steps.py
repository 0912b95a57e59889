"""Tests of how the rows of a batch are divided into steps."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.backends.cpu.steps import StepImages, check_whole, rows_after_images, steps_of
from llmrun.base.types import IMAGE_ROW, Batch
from llmrun.formats.layouts.arena import floats_at

lengths_of_sequences = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def rows_of(lengths: list[int]) -> list[int]:
    return [sequence for sequence, length in enumerate(lengths) for _ in range(length)]


@given(lengths_of_sequences, st.integers(9, 30), st.booleans())
def test_steps_are_small_and_have_all_rows_in_order(lengths: list[int], most: int, whole: bool) -> None:
    rows = rows_of(lengths)
    steps = list(steps_of(rows, most, whole=whole))
    assert [row for step in steps for row in range(len(rows))[step]] == [*range(len(rows))]
    assert all(1 <= len(rows[step]) <= most for step in steps)
    if whole:
        assert sum(len(set(rows[step])) for step in steps) == len(lengths)
    else:
        assert all(len(rows[step]) == most for step in steps[:-1])


@given(lengths_of_sequences, st.integers(9, 30), st.sets(st.integers(1, 20)))
def test_steps_end_where_another_must_begin(lengths: list[int], most: int, beginnings: set[int]) -> None:
    rows = rows_of(lengths)
    own = sorted(row for row in beginnings if row < len(rows))
    steps = list(steps_of(rows, most, whole=False, beginnings=own))
    assert [row for step in steps for row in range(len(rows))[step]] == [*range(len(rows))]
    starts = [step.start for step in steps]
    assert {*own} <= {*starts}
    assert all(step.stop - step.start == most for step in steps[:-1] if step.stop not in own)


def test_text_after_an_image_begins_a_step() -> None:
    """Only rows of the same sequence count, and only images in the batch."""
    tokens = [5, -1, -1, 5, -1, 5, 6, 6, 5, -1]
    sequences = [0, 0, 0, 1, 1, 2, 1, 1, 0, 0]
    column = np.array(tokens, np.int32)
    batch = Batch(
        column, np.array(sequences, np.int32), column, np.zeros(10, np.uint8), None, np.zeros((4, 8), np.float32)
    )
    assert rows_after_images(batch) == [6, 8]


@pytest.mark.push
@given(lengths_of_sequences)
def test_whole_sequences_are_accepted_in_any_order(lengths: list[int]) -> None:
    rows = [len(lengths) - 1 - sequence for sequence in rows_of(lengths)]
    check_whole(rows, [position for _, group in groupby(rows) for position, _ in enumerate(group)])


@pytest.mark.parametrize(
    ("sequences", "positions"),
    [([0, 0], [1, 2]), ([0, 1, 0], [0, 0, 1]), ([0, 1, 1], [0, 3, 4])],
    ids=["continued", "interleaved", "second continued"],
)
def test_parts_of_sequences_are_refused(sequences: list[int], positions: list[int]) -> None:
    with pytest.raises(ValueError, match="all rows of a sequence together"):
        check_whole(sequences, positions)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), min_size=1, max_size=9), st.integers(5, 20))
def test_images_that_see_ahead_are_never_divided(parts: list[tuple[int, int]], most: int) -> None:
    """Each part is some text and an image. Only longer images make steps larger."""
    ahead = np.array([n for text, image in parts for n in [*[0] * text, *range(image - 1, -1, -1)]], np.int32)
    steps = list(steps_of([0] * len(ahead), most, whole=False, ahead=ahead))
    assert [row for step in steps for row in range(len(ahead))[step]] == [*range(len(ahead))]
    assert all(not ahead[step.stop - 1] for step in steps)
    for step in steps:
        size = step.stop - step.start
        assert 1 <= size <= most or ahead[step.start] == size - 1


def test_each_step_gets_the_rows_of_its_images() -> None:
    tokens = np.array([5, IMAGE_ROW, IMAGE_ROW, 6, IMAGE_ROW, 7], np.int32)
    embeds = np.arange(12, dtype=np.float32).reshape(3, 4)
    ahead = np.array([0, 1, 0, 0, 0, 0], np.int32)
    zeros, rows = np.zeros(6, np.int32), np.arange(6, dtype=np.int32)
    batch = Batch(tokens, zeros, rows, zeros.astype(np.uint8), embeds=embeds, ahead=ahead)
    assert StepImages.of(batch, slice(3, 4)) is None
    for step in (slice(0, 6), slice(0, 2), slice(2, 6), slice(4, 5)):
        images = StepImages.of(batch, step)
        assert images is not None
        assert (images.addresses != 0).tolist() == (tokens[step] == IMAGE_ROW).tolist()
        found = [floats_at(address, 1, 4)[0] for address in images.addresses.tolist() if address]
        first = np.count_nonzero(tokens[: step.start] == IMAGE_ROW)
        np.testing.assert_array_equal(found, embeds[first : first + len(found)])
        assert (images.ahead is None) == (not ahead[step].any())
