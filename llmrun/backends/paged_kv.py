"""The paged KV cache: which blocks hold which positions of which sequence.

Blocks of 32 positions are counted references: sharing a prefix copies a table, and a block that two sequences hold is
copied before one of them writes to it. The bytes belong to the caller: uint8[layers, blocks, bytes of a block].
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from llmrun.errors import KVFull
from llmrun.kernels.kv_layout import BLOCK

if TYPE_CHECKING:
    from numpy.typing import NDArray


class PagedKV:
    """KVCache over `memory`. `tables` int32[sequences, blocks of a full context] is what the kernels read."""

    def __init__(self, memory: NDArray[np.uint8], max_sequences: int, context_size: int) -> None:
        self._memory = memory
        n_blocks = memory.shape[1]
        self._references = np.zeros(n_blocks, np.int32)
        self._free = list(range(n_blocks - 1, -1, -1))
        self.lengths = [0] * max_sequences
        self.tables = np.zeros((max_sequences, -(-context_size // BLOCK)), np.int32)

    @property
    def capacity(self) -> int:
        return len(self._references) * BLOCK

    def copy(self, src: int, dst: int, n: int) -> int:
        if src == dst:
            return self.truncate(dst, n)
        n = min(n, self.lengths[src])
        self.free(dst)
        shared = self.tables[src, : -(-n // BLOCK)]
        self.tables[dst, : len(shared)] = shared
        self._references[shared] += 1
        self.lengths[dst] = n
        return n

    def truncate(self, seq: int, n: int) -> int:
        n = min(n, self.lengths[seq])
        for block in self.tables[seq, -(-n // BLOCK) : -(-self.lengths[seq] // BLOCK)].tolist():
            self._drop(block)
        self.lengths[seq] = n
        return n

    def free(self, seq: int) -> None:
        self.truncate(seq, 0)

    def extend(self, growth: dict[int, int]) -> None:
        """Make room for `growth[seq]` more positions of each sequence. Raises KVFull before anything has changed."""
        wanted = self._blocks_wanted(growth)
        if wanted > len(self._free):
            raise KVFull(
                f"KV cache is full: {wanted} more blocks of {BLOCK} tokens wanted, {len(self._free)} free of "
                f"{len(self._references)}"
            )
        for seq, n in growth.items():
            self._own_last_block(seq)
            old, new = (-(-length // BLOCK) for length in (self.lengths[seq], self.lengths[seq] + n))
            for index in range(old, new):
                self.tables[seq, index] = self._take()
            self.lengths[seq] += n

    def _blocks_wanted(self, growth: dict[int, int]) -> int:
        new = sum(-(-(self.lengths[seq] + n) // BLOCK) - -(-self.lengths[seq] // BLOCK) for seq, n in growth.items())
        # Of the holders of a block that all write to it, the last one keeps it.
        writers = Counter(
            int(self.tables[seq, self.lengths[seq] // BLOCK]) for seq in growth if self._shares_last_block(seq)
        )
        return new + sum(min(n, int(self._references[block]) - 1) for block, n in writers.items())

    def _shares_last_block(self, seq: int) -> bool:
        """The next position falls into a block that another sequence holds too."""
        length = self.lengths[seq]
        return bool(length % BLOCK) and bool(self._references[self.tables[seq, length // BLOCK]] > 1)

    def _own_last_block(self, seq: int) -> None:
        if not self._shares_last_block(seq):
            return
        index = self.lengths[seq] // BLOCK
        old, new = int(self.tables[seq, index]), self._take()
        self._memory[:, new] = self._memory[:, old]
        self.tables[seq, index] = new
        self._drop(old)

    def _take(self) -> int:
        block = self._free.pop()
        self._references[block] = 1
        return block

    def _drop(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free.append(block)
