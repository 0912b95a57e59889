"""Maps rows of a sequence to llama.cpp's positions, which differ after images in models with M-RoPE.

All rows of an image have the same position in time there, and the text after an image continues at a position that
depends on the image's height and width. llama.cpp's memory knows only the positions in time, so it cannot separate the
rows of an image.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from llmrun.backends.llama.messages import CELLS_START, MROPE_CELL


class Positions:
    """llama.cpp's position of each row of each sequence."""

    def __init__(self, max_sequences: int, *, images: bool) -> None:
        """Create empty sequences.

        images  whether the model has M-RoPE and reads images; otherwise, positions are the numbers of rows
        """
        self._times: list[list[int]] | None = [[] for _ in range(max_sequences)] if images else None

    def add(self, sequences: Sequence[int], positions: Sequence[int]) -> None:
        """Append rows with these positions to their sequences."""
        if self._times is not None:
            for seq, position in zip(sequences, positions, strict=True):
                self._times[seq].append(position)

    def end(self, seq: int, n: int) -> int:
        """Return the first position after the first n rows of a sequence."""
        if self._times is None or n == 0:
            return n
        return self._times[seq][n - 1] + 1

    def border(self, seq: int, n: int) -> int:
        """Return n, or the row at which an image begins if the first n rows would end inside the image."""
        if self._times is None or n >= len(self._times[seq]):
            return n
        return bisect_left(self._times[seq], self._times[seq][n])

    def rows_before(self, seq: int, position: int) -> int:
        """Return how many rows of a sequence are before a position."""
        return position if self._times is None else bisect_left(self._times[seq], position)

    def truncate(self, seq: int, n: int) -> None:
        if self._times is not None:
            del self._times[seq][n:]

    def copy(self, src: int, dst: int, n: int) -> None:
        if self._times is not None:
            self._times[dst] = self._times[src][:n]

    def load(self, seq: int, data: Any, n: int) -> None:
        """Set the positions of a sequence to those in a saved sequence of n rows, whose format is in kv_cache.py."""
        if self._times is not None:
            words = (ctypes.c_int32 * (MROPE_CELL * n)).from_buffer(data, 4 * CELLS_START)
            self._times[seq] = sorted(words[::MROPE_CELL])
