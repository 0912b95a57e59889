"""Tests of how the rows of a batch are divided into steps."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.backends.cpu.steps import check_whole, steps_of

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
