"""The paged KV cache: which blocks hold which positions of which sequence.

Layers that see a window only have blocks of their own (kv_pool.py), of which a sequence keeps the last ones: it can be
cut back as far as its windows are whole. The bytes belong to the caller.
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
    """KVCache over memory by window: uint8[layers, blocks, bytes of a block] of each group of layers. Window 0: all
    positions are kept.

    tables   int32[windows, sequences, blocks of a full context]
    lengths  tokens that each sequence holds
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
        """Windows bound nothing: each sequence has room for its own."""
        return self._n_blocks * BLOCK

    def copy(self, src: int, dst: int, n: int) -> int:
        """`kept` is n, or 0 where a window of src that ends there is not whole any more; so it is of `truncate`."""
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
        """Raise KVFull where there is no room for `growth[seq]` more positions of each sequence, in one step or in
        several."""
        for pool in self._pools:
            pool.require(growth, self.lengths)

    def extend(self, growth: Mapping[int, int]) -> None:
        """Make room for `growth[seq]` more positions of each sequence, which one step writes. What none of them sees
        may be gone then. Raises KVFull before anything has changed."""
        self.require(growth)
        for seq, n in growth.items():
            for pool in self._pools:
                pool.extend(seq, self.lengths[seq], n)
            self.lengths[seq] += n

    def table_addresses(self, sequences: NDArray[np.int32]) -> NDArray[np.int64]:
        """int64[windows, rows], of rows of these sequences."""
        return self._addresses + sequences.astype(np.int64) * self.tables.strides[1]

    def _kept(self, seq: int, n: int) -> int:
        n = min(n, self.lengths[seq])
        return n if all(pool.reaches(seq, n) for pool in self._pools) else 0
