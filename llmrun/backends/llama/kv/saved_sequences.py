"""Saves the sequences of a llama.cpp context, and loads them again. The child process uses this (worker.py)."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mmap

_ALL = 0  # save everything that belongs to a sequence


class SavedSequences:
    """The sequences of a context, through llama.cpp's functions for saved states."""

    def __init__(self, llama: Any, context: Any) -> None:
        self._llama = llama
        self._context = context
        self._cache = llama.llama_get_memory(context)

    def size(self, seq: int) -> int:
        """Return the size of a saved sequence in bytes, or 0 if llama.cpp cannot save it."""
        size: int = self._llama.llama_state_seq_get_size_ext(self._context, seq, _ALL)
        return size

    def save(self, seq: int, memory: mmap.mmap) -> int:
        """Write a sequence to memory. Returns the number of bytes, or 0 if the memory is too small."""
        data = (ctypes.c_uint8 * len(memory)).from_buffer(memory)
        written: int = self._llama.llama_state_seq_get_data_ext(self._context, data, len(memory), seq, _ALL)
        return written

    def load(self, seq: int, memory: mmap.mmap) -> bool:
        """Load a sequence that is empty. Returns False if llama.cpp does not understand all of the data.

        Call `empty` if the result is not acceptable. Malicious data can crash the process.
        """
        data = (ctypes.c_uint8 * len(memory)).from_buffer(memory)
        read = self._llama.llama_state_seq_set_data_ext(self._context, data, len(memory), seq, _ALL)
        if read not in (0, self.size(seq)):
            _give_up("some cells of a loaded sequence cannot be found again")
        return bool(read == len(memory))

    def empty(self, seq: int, empty_size: int) -> None:
        """Remove all data of a sequence. End the process if some is left.

        llama.cpp cannot remove what it loaded for negative positions. It would become part of later sequences.

        empty_size  the size of an empty sequence
        """
        self._llama.llama_memory_seq_rm(self._cache, seq, -1, -1)
        if self.size(seq) != empty_size or self._llama.llama_memory_seq_pos_max(self._cache, seq) != -1:
            _give_up("a loaded sequence cannot be removed")


def _give_up(why: str) -> None:
    os.write(2, f"llama.cpp: error: {why}\n".encode())
    os.abort()
