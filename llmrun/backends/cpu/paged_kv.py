"""The paged KV cache, which maps the positions of each sequence to blocks.

Layers with a sliding window have separate blocks (kv_pool.py), and a sequence keeps only the most recent of these
blocks. A sequence can be truncated only to a position whose whole window is still cached. If the model has recurrent
layers, their state at the position must be available, too (recurrent_states.py). The caller owns the memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.cpu.kv_pool import BlockPool, blocks_in
from llmrun.backends.cpu.recurrent_states import RecurrentStates
from llmrun.backends.cpu.saved_blocks import consecutive_blocks, load_block, saved_blocks
from llmrun.base.errors import IntegrityError
from llmrun.formats.layouts.arena import address_of
from llmrun.formats.layouts.kv_blocks import BLOCK

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.saved_parts import SavedPart


class PagedKV:
    """A KVCache in memory that the caller owns.

    `memory` maps each window to arrays of uint8[layers, blocks, bytes per block], one array per group of layers. A
    window of 0 means that all positions are kept. `states` are the recurrent states, or None if the model has none.

    block_size  number of tokens in a block
    key      identifies the model and its cache for saved parts; empty if parts cannot be saved
    tables   int32[windows, sequences, blocks per context]
    lengths  number of tokens in each sequence
    """

    block_size = BLOCK
    saves_blocks = True

    def __init__(
        self,
        memory: Mapping[int, Sequence[NDArray[np.uint8]]],
        max_sequences: int,
        context_size: int,
        states: RecurrentStates | None = None,
        key: str = "",
    ) -> None:
        self.states = states
        self.key = key
        self._context_size = context_size
        self.lengths = [0] * max_sequences
        self.tables = np.zeros((len(memory), max_sequences, blocks_in(context_size)), np.int32)
        self._pools = [
            BlockPool(window, groups, table)
            for (window, groups), table in zip(memory.items(), self.tables, strict=True)
        ]
        self._addresses = np.array([address_of(table) for table in self.tables], np.int64).reshape(-1, 1)
        # Only the pools without a window can be full.
        self._whole = [pool for window, pool in zip(memory, self._pools, strict=True) if not window]
        self._n_blocks = min((pool.n_blocks for pool in self._whole), default=max_sequences * self.tables.shape[2])

    @property
    def capacity(self) -> int:
        """The total number of tokens that fit in the cache.

        Sliding windows do not limit it, because each sequence has its own share of their blocks.
        """
        return self._n_blocks * BLOCK

    @property
    def free_blocks(self) -> int:
        """The number of free blocks. All sequences together hold the others."""
        return min((pool.free_blocks for pool in self._whole), default=self._n_blocks)

    def needed(self, seq: int, n: int) -> int:
        """Return how many free blocks a sequence takes to grow to n tokens. See KVCache."""
        length = self.lengths[seq]
        return max((pool.needed(seq, length, n) for pool in self._whole), default=0)

    def held(self, sequences: Sequence[int]) -> int:
        """Return how many blocks become free if these sequences are freed."""
        return min((pool.held(sequences, self.lengths) for pool in self._whole), default=0)

    def copy(self, src: int, dst: int, n: int) -> int:
        """Copy the first n positions from one sequence to another, and return the number of positions kept.

        The result is n, or the sequence's length if that is smaller. If the recurrent state at this position is not
        available, the result is the position of an earlier checkpoint. A position counts only if the windows that end
        there are still complete. If there is none, the result is 0. The result of `truncate` follows the same rules.
        """
        if src == dst:
            return self.truncate(dst, n)
        self.free(dst)
        kept = self._kept(src, n)
        if kept:
            for pool in self._pools:
                pool.share(src, dst, kept)
            if self.states is not None:
                self.states.share(src, dst, kept)
            self.lengths[dst] = kept
        return kept

    def truncate(self, seq: int, n: int) -> int:
        kept = self._kept(seq, n)
        for pool in self._pools:
            pool.cut(seq, self.lengths[seq], kept)
        if self.states is not None:
            self.states.cut(seq, kept)
            if kept == self.lengths[seq]:
                # A truncation that removes nothing usually comes from a new request. Rejecting a draft removes tokens.
                self.states.expect_prompt(seq)
        self.lengths[seq] = kept
        return kept

    def free(self, seq: int) -> None:
        self.truncate(seq, 0)

    def save(self, seq: int, n: int) -> list[SavedPart]:
        n = min(n, self.lengths[seq])
        return saved_blocks(self._pools, seq, n) + (self.states.save(seq, n) if self.states is not None else [])

    def load(self, seq: int, parts: Sequence[SavedPart]) -> int:
        self.free(seq)
        blocks = consecutive_blocks(parts, self._context_size)
        n = blocks[-1].end if blocks else 0
        self.require({seq: n})
        with suppress(IntegrityError):  # the positions before a damaged part are still useful
            for part in blocks:
                load_block(self._pools, seq, part, n)
                self.lengths[seq] = part.end
        if self.states is not None:
            self.states.load(seq, self.lengths[seq], parts)
        return self.truncate(seq, self.lengths[seq])

    def require(self, growth: Mapping[int, int]) -> None:
        """Raise KVFull if there is no room for `growth[seq]` more positions in each sequence, in one or more steps."""
        for pool in self._pools:
            pool.require(growth, self.lengths)

    def extend(self, growth: Mapping[int, int]) -> None:
        """Make room for `growth[seq]` more positions in each sequence, all of which the next step will write.

        Positions outside the windows of the new positions may be dropped. If this raises KVFull, nothing has changed.
        """
        self.require(growth)
        for seq, n in growth.items():
            for pool in self._pools:
                pool.extend(seq, self.lengths[seq], n)
            self.lengths[seq] += n

    def table_addresses(self, sequences: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the addresses of the block tables, int64[windows, rows], for rows of these sequences."""
        return self._addresses + sequences.astype(np.int64) * self.tables.strides[1]

    def _kept(self, seq: int, n: int) -> int:
        n = min(n, self.lengths[seq])
        positions = [n] if self.states is None else self.states.reachable(seq, n)
        return next((at for at in positions if all(pool.reaches(seq, at) for pool in self._pools)), 0)
