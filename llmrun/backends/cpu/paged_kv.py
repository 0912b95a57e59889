"""The paged KV cache, which maps the positions of each sequence to blocks.

Layers with a sliding window have separate blocks (kv_pool.py), and a sequence keeps only the last of these. It can be
truncated only as far as its windows are still complete. The caller owns the memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.cpu.kv_pool import BlockPool, blocks_in
from llmrun.layouts.arena import address_of
from llmrun.layouts.kv_blocks import BLOCK

if TYPE_CHECKING:
    from numpy.typing import NDArray


class PagedKV:
    """A KVCache over the caller's memory.

    `memory` maps each window to arrays of uint8[layers, blocks, bytes of a block], one per group of layers. Window 0
    means that all positions are kept.

    tables   int32[windows, sequences, blocks of a full context]
    lengths  number of tokens in each sequence
    """

    def __init__(
        self, memory: Mapping[int, Sequence[NDArray[np.uint8]]], max_sequences: int, context_size: int
    ) -> None:
        self.lengths = [0] * max_sequences
        self.tables = np.zeros((len(memory), max_sequences, blocks_in(context_size)), np.int32)
        self._pools = [
            BlockPool(window, groups, table)
            for (window, groups), table in zip(memory.items(), self.tables, strict=True)
        ]
        self._addresses = np.array([address_of(table) for table in self.tables], np.int64).reshape(-1, 1)
        whole = [pool.n_blocks for window, pool in zip(memory, self._pools, strict=True) if not window]
        self._n_blocks = min(whole, default=max_sequences * self.tables.shape[2])

    @property
    def capacity(self) -> int:
        """The total number of tokens that fit. Windows do not limit it, as every sequence has its share of blocks."""
        return self._n_blocks * BLOCK

    def copy(self, src: int, dst: int, n: int) -> int:
        """Copy the first n positions from one sequence to another, and return the number of positions kept.

        That is n (or the length, if smaller), or 0 if the window that ends there is no longer complete. The same holds
        for `truncate`.
        """
        if src == dst:
            return self.truncate(dst, n)
        self.free(dst)
        kept = self._kept(src, n)
        if kept:
            for pool in self._pools:
                pool.share(src, dst, kept)
            self.lengths[dst] = kept
        return kept

    def truncate(self, seq: int, n: int) -> int:
        kept = self._kept(seq, n)
        for pool in self._pools:
            pool.cut(seq, self.lengths[seq], kept)
        self.lengths[seq] = kept
        return kept

    def free(self, seq: int) -> None:
        self.truncate(seq, 0)

    def require(self, growth: Mapping[int, int]) -> None:
        """Raise KVFull if there is no room for `growth[seq]` more positions of each sequence, in one or more steps."""
        for pool in self._pools:
            pool.require(growth, self.lengths)

    def extend(self, growth: Mapping[int, int]) -> None:
        """Make room for `growth[seq]` more positions of each sequence, all written by the next step.

        May drop positions that the new ones do not see. On KVFull, nothing has changed.
        """
        self.require(growth)
        for seq, n in growth.items():
            for pool in self._pools:
                pool.extend(seq, self.lengths[seq], n)
            self.lengths[seq] += n

    def table_addresses(self, sequences: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the address of the block table for each row, int64[windows, rows], given the sequence of each row."""
        return self._addresses + sequences.astype(np.int64) * self.tables.strides[1]

    def _kept(self, seq: int, n: int) -> int:
        n = min(n, self.lengths[seq])
        return n if all(pool.reaches(seq, n) for pool in self._pools) else 0
