"""Checks the start of a sequence that llama.cpp saved, before llama.cpp reads it.

llama.cpp accepts any positions. Cells with negative positions could never be removed again, and repeated positions
would take more room than the length of the sequence says. Everything is in native byte order (llama.cpp's
`llama_context::state_seq_get_data`, `llama_kv_cache::state_write` and `llama_memory_recurrent::state_write`):

    uint32   a magic number
    int32    the sequence
    uint32   the number of streams, which is 1; absent if the model has only a recurrent state
    uint32   the number of cells
    for each cell:
        int32    the position
        uint32   the number of sequences: 1, or 0 in a recurrent state
        int32[3] two more positions and the token; only in models with M-RoPE
        int32    the sequence; absent in a recurrent state
"""

from __future__ import annotations

from typing import Final

import numpy as np

RECURRENT_CELL: Final = 2  # words for each cell
CELL: Final = 3
MROPE_CELL: Final = 6


def is_whole(data: memoryview | bytes | bytearray, n: int, cell_words: int) -> bool:
    """Return whether a saved sequence has the positions from 0 to n - 1, or the state after them.

    cell_words  RECURRENT_CELL, CELL or MROPE_CELL
    """
    words = np.frombuffer(data, np.int32, min(len(data) // 4, 4 + cell_words * n))
    if cell_words == RECURRENT_CELL:
        state: list[int] = words[2:5].tolist()
        return state == [1, n - 1, 0]
    head: list[int] = words[2:4].tolist()
    positions, sequences = words[4::cell_words], words[5::cell_words]
    return head == [1, n] and np.array_equal(np.sort(positions), np.arange(n)) and np.array_equal(sequences, np.ones(n))
