"""Tests of the check of saved sequences: every position occurs once, and nothing else is accepted."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llmrun.backends.llama.kv_cache import CELL, RECURRENT_CELL, is_whole
from llmrun.backends.llama.messages import MROPE_CELL

MAGIC = 0x2F143CD8


def saved(positions: list[int], *, words: int = CELL, sequences: int = 1, streams: int = 1) -> bytes:
    """Return the start of a saved sequence with some data after it. `words` is the size of a cell."""
    cells = [number for at in positions for number in (at, sequences, *[7] * (words - CELL), 3)]
    return np.array([MAGIC, 3, streams, len(positions), *cells, *range(100)], np.int32).tobytes()


@given(st.permutations(list(range(20))), st.sampled_from([CELL, MROPE_CELL]))
def test_positions_in_any_order_are_whole(positions: list[int], words: int) -> None:
    data = saved(positions, words=words)
    assert is_whole(data, 20, words)
    assert not is_whole(data, 19, words)
    assert not is_whole(data, 21, words)
    assert not is_whole(data, 20, CELL + MROPE_CELL - words)
    assert not is_whole(data, 20, RECURRENT_CELL)


@given(st.lists(st.integers(-3, 25), min_size=1, max_size=25), st.sampled_from([CELL, MROPE_CELL]))
def test_other_positions_are_not_whole(positions: list[int], words: int) -> None:
    whole = sorted(positions) == list(range(len(positions)))
    assert is_whole(saved(positions, words=words), len(positions), words) == whole


def test_cells_of_no_or_several_sequences_are_not_whole() -> None:
    assert not is_whole(saved([0, 1, 2], sequences=0), 3, CELL)
    assert not is_whole(saved([0, 1, 2], sequences=2), 3, CELL)
    assert not is_whole(saved([0, 1, 2], streams=2), 3, CELL)


def test_a_recurrent_state_has_one_cell_at_the_last_position() -> None:
    for cells, position, sequences in [(1, 4, 0), (2, 4, 0), (0, 4, 0), (1, 5, 0), (1, -1, 0), (1, 4, 1)]:
        data = np.array([MAGIC, 3, cells, position, sequences, 8, 8], np.int32).tobytes()
        assert is_whole(data, 5, RECURRENT_CELL) == ((cells, position, sequences) == (1, 4, 0))


@given(st.binary(max_size=200), st.integers(1, 300), st.sampled_from([RECURRENT_CELL, CELL, MROPE_CELL]))
def test_other_data_is_not_whole(data: bytes, n: int, words: int) -> None:
    assert not is_whole(data, n, words)


def test_data_that_is_cut_off_is_not_whole() -> None:
    data = saved(list(range(5)))
    for n_bytes in range(4 * (4 + 3 * 5 - 1)):  # The last cell may lack its sequence, which llama.cpp notices.
        assert not is_whole(data[:n_bytes], 5, CELL)
