"""The KV cache of llama.cpp as the engine sees it, and a check of saved sequences before llama.cpp reads them.

The check is necessary because llama.cpp accepts any positions. Cells with negative positions could never be removed
again, and repeated positions would take more room than the length of the sequence indicates.

A saved sequence starts with these fields, in native byte order (llama.cpp's
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

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from llmrun.backends.base import SEQUENCE_PART, SavedPart
from llmrun.backends.llama.messages import CELLS_START
from llmrun.base.errors import BackendCrashed, IntegrityError, KVFull, LlmrunError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.llama.process import LlamaProcess

RECURRENT_CELL: Final = 2  # words per cell of a saved sequence
CELL: Final = 3


def is_whole(data: memoryview | bytes | bytearray, n: int, cell_words: int, *, images: bool = False) -> bool:
    """Return whether a saved sequence contains the positions from 0 to n - 1, or the state after these positions.

    cell_words  RECURRENT_CELL, CELL or MROPE_CELL
    images      allow the positions of images in models with M-RoPE: the rows of an image have the same position, and
                the text after an image may skip positions, but no row's position is greater than its number
    """
    words = np.frombuffer(data, np.int32, min(len(data) // 4, CELLS_START + cell_words * n))
    if cell_words == RECURRENT_CELL:
        state: list[int] = words[2:5].tolist()
        return state == [1, n - 1, 0]
    head: list[int] = words[2:4].tolist()
    positions, sequences = np.sort(words[CELLS_START::cell_words]), words[CELLS_START + 1 :: cell_words]
    if head != [1, n] or not np.array_equal(sequences, np.ones(n)):
        return False
    numbers = np.arange(n)
    if images:
        return len(positions) == n and positions[0] == 0 and bool((positions <= numbers).all())
    return np.array_equal(positions, numbers)


class LlamaCache:
    """A KVCache that llama.cpp stores in the child process."""

    block_size = 1
    saves_blocks = False

    def __init__(
        self,
        process: LlamaProcess,
        capacity: int,
        lengths: NDArray[np.int32],
        path: str,
        *,
        context_size: int,
        cell_words: int,
        key: str,
        images: bool = False,
    ) -> None:
        """Wrap the cache of the model that is open in `process`.

        lengths     the shared array in which the process stores the number of tokens in each sequence
        path        the model file, for error messages
        cell_words, images  numbers that llama.cpp saves for each cell, and their meaning, as in `is_whole`
        key         identifies the model and its cache for saved parts; empty if parts cannot be saved
        """
        self._process = process
        self._doing = f"running {path}"
        self._path = path
        self._lengths = lengths
        self._context_size = context_size
        self._cell_words, self._images = cell_words, images
        self.capacity = capacity
        self.key = key

    @property
    def lengths(self) -> list[int]:
        """The number of tokens in each sequence."""
        # An interrupted truncation may still be running and could change the lengths after they are read.
        self._process.settle(self._doing)
        lengths: list[int] = self._lengths.tolist()
        return lengths

    @property
    def free_blocks(self) -> int:
        """The number of free cells, each for one token. Cells that sequences share count more than once.

        The result can therefore be negative. Together with `held`, which counts cells in the same way, the result is a
        lower bound.
        """
        return self.capacity - sum(self.lengths)

    def needed(self, seq: int, n: int) -> int:
        return max(0, n - self.lengths[seq])

    def held(self, sequences: Sequence[int]) -> int:
        lengths = self.lengths
        return sum(lengths[seq] for seq in sequences)

    def copy(self, src: int, dst: int, n: int) -> int:
        kept: int = self._process.ask("copy", self._doing, src=src, dst=dst, n=n)["kept"]
        return kept

    def truncate(self, seq: int, n: int) -> int:
        kept: int = self._process.ask("truncate", self._doing, seq=seq, n=n)["kept"]
        return kept

    def free(self, seq: int) -> None:
        self.truncate(seq, 0)

    def return_free_memory(self) -> None:
        """Do nothing, because llama.cpp cannot return parts of its cache."""

    def save(self, seq: int, n: int) -> list[SavedPart]:
        """Return a part with all tokens of the sequence, because llama.cpp cannot save only some tokens."""
        length = self.lengths[seq]
        n_bytes: int = self._process.ask("saved_size", self._doing, seq=seq)["n_bytes"]
        if not n_bytes or not min(n, length):
            return []
        return [SavedPart(SEQUENCE_PART, 0, length, 0, n_bytes, partial(self._read, seq, n_bytes))]

    def _read(self, seq: int, n_bytes: int) -> memoryview:
        """Return a saved sequence, which the process writes into memory that is freed together with the result."""
        memory, name = self._process.transfers.map(n_bytes)
        answer = self._process.ask("save", f"saving the state of {self._path}", seq=seq, memory=name, n_bytes=n_bytes)
        if answer["n_bytes"] != n_bytes:
            raise LlmrunError(
                f"llama.cpp cannot save the state of {self._path}: it wrote {answer['n_bytes']:,} of {n_bytes:,} bytes"
            )
        return memoryview(memory)

    def load(self, seq: int, parts: Sequence[SavedPart]) -> int:
        """Replace the contents of a sequence with a saved sequence, as specified by KVCache.load.

        Raises BackendCrashed if the data crashes llama.cpp.
        """
        self.free(seq)
        part = next((part for part in parts if part.kind == SEQUENCE_PART and part.start == 0), None)
        if part is None or not 0 < part.end <= self._context_size:
            return 0
        try:
            data = part.read()
        except IntegrityError:
            return 0
        if len(data) != part.n_bytes or not is_whole(data, part.end, self._cell_words, images=self._images):
            return 0
        memory, name = self._process.transfers.map(part.n_bytes)
        memory[:] = data
        del data  # The data can take gigabytes, and llama.cpp reads the copy.
        doing = f"loading a saved state of {self._path}"
        try:
            answer = self._process.ask("load", doing, seq=seq, memory=name, n_bytes=part.n_bytes, n=part.end)
        except BackendCrashed as error:
            raise BackendCrashed(
                str(error), hint="the saved state may be damaged: use --no-save-state or another --prompt-cache"
            ) from error
        kept: int = answer["kept"]
        if not kept and self.free_blocks < part.end:
            raise KVFull(f"KV cache is full: {self._path}: no room for {part.end} saved tokens")
        return kept
