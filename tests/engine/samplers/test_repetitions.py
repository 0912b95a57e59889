"""Tests that repetitions are found, against a search place by place."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llmrun.engine.samplers import suffix_lengths


def searched(tokens: list[int], least: int) -> list[int]:
    lengths = [0] * len(tokens)
    for start in range(1, len(tokens)):
        n = 0
        while start + n < len(tokens) and tokens[start + n] == tokens[n]:
            n += 1
        lengths[start] = n if n >= least else 0
    return lengths


PHRASES = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@given(
    parts=st.lists(st.tuples(PHRASES, st.integers(1, 6)), min_size=1, max_size=5),
    again=st.integers(0, 3),
    least=st.integers(1, 12),
)
def test_lengths_are_those_of_a_plain_search(parts: list[tuple[list[int], int]], again: int, least: int) -> None:
    """Texts with periods, and with periods of periods, have boxes inside of boxes."""
    tokens = [token for phrase, times in parts for token in phrase * times]
    tokens = (tokens * (again + 1))[:300]
    assert suffix_lengths(np.array(tokens), least).tolist() == searched(tokens, least)


def test_a_single_repeated_token_is_no_special_case() -> None:
    assert suffix_lengths(np.zeros(50, np.intp), 1).tolist() == [0, *range(49, 0, -1)]
    assert suffix_lengths(np.zeros(1, np.intp), 1).tolist() == [0]
