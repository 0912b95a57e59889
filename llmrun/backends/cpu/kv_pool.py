"""A pool of blocks of the paged KV cache, for all layers that look back equally far.

Blocks are counted references: sharing a prefix copies a part of a table, and a block that two sequences hold is copied
before one of them writes to it. Where layers see a window only, a sequence keeps its last blocks and gives back the
others as it grows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from llmrun.errors import KVFull
from llmrun.layouts.kv_blocks import BLOCK

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Tokens that a sequence can be cut back by, besides those of its last step, before its window is lost: chats do that
# when they ask once more, or render an answer otherwise than it was written. llama.cpp keeps as many.
_CUT_BACK: Final = 256


def blocks_in(tokens: int) -> int:
    return -(-tokens // BLOCK)


def blocks_of_window(window: int, max_rows: int) -> int:
    """Blocks that a sequence keeps for rows that see so many positions, if a step has at most `max_rows` of its rows:
    what they see and what it can be cut back by, wherever in a block that begins."""
    return blocks_in(window - 1 + max_rows + _CUT_BACK + BLOCK - 1)


def blocks_of_sequence(window: int, context_size: int, max_rows: int) -> int:
    """Blocks that a sequence has at most. `window` 0: rows see all positions."""
    whole = blocks_in(context_size)
    return min(whole, blocks_of_window(window, max_rows)) if window else whole


class BlockPool:
    """Which blocks of `memory` (uint8[layers, blocks, bytes of a block], one for each group of layers) hold which
    positions.

    window  positions that a row sees, its own among them; 0: all
    table   int32[sequences, blocks of a full context], for the kernels to read: what a block of a sequence's window is

    With a window each sequence has an equal share of the blocks: such a pool is never full.
    """

    def __init__(self, window: int, memory: Sequence[NDArray[np.uint8]], table: NDArray[np.int32]) -> None:
        n_blocks = memory[0].shape[1]
        self._window = window
        self._memory = memory
        self._table = table
        self._share = n_blocks // len(table) if window else table.shape[1]
        self._firsts = [0] * len(table)  # blocks before it have been given back
        self._references = np.zeros(n_blocks, np.int32)
        self._free = list(range(n_blocks - 1, -1, -1))

    @property
    def n_blocks(self) -> int:
        return len(self._references)

    def reaches(self, seq: int, n: int) -> bool:
        """Whether all is there that a row after the first n positions sees."""
        first = self._firsts[seq]
        return first == 0 or first * BLOCK <= n - self._window + 1

    def share(self, src: int, dst: int, n: int) -> None:
        """Let dst, which holds nothing, hold what src does of its first n positions. Needs `reaches`."""
        first = self._firsts[src]
        shared = self._table[src, first : blocks_in(n)]
        self._table[dst, first : blocks_in(n)] = shared
        self._firsts[dst] = first
        self._references[shared] += 1

    def cut(self, seq: int, length: int, n: int) -> None:
        """Keep the first n of `length` positions. Needs `reaches`, or n to be 0."""
        first = max(self._firsts[seq], blocks_in(n))
        if n == 0:
            self._firsts[seq] = 0
        self._drop(self._table[seq, first : blocks_in(length)])

    def require(self, growth: Mapping[int, int], lengths: Sequence[int]) -> None:
        """Raise KVFull where there is no room for `growth[seq]` more positions of each sequence."""
        if self._window:
            return
        wanted = self._blocks_wanted(growth, lengths)
        if wanted > len(self._free):
            raise KVFull(
                f"KV cache is full: {wanted} more blocks of {BLOCK} tokens wanted, {len(self._free)} free of "
                f"{self.n_blocks}"
            )

    def extend(self, seq: int, length: int, n: int) -> None:
        """Make room for n positions after `length`, by giving back what none of them sees. Needs `require`."""
        end = blocks_in(length + n)
        self._give_back(seq, end - self._share, length)
        self._own_last_block(seq, length)
        for index in range(blocks_in(length), end):
            self._table[seq, index] = self._take()

    def _give_back(self, seq: int, first: int, length: int) -> None:
        """The blocks before `first`."""
        old = self._firsts[seq]
        if first <= old:
            return
        assert first * BLOCK <= length - self._window + 1, "more rows in a step than the cache has blocks for"
        self._firsts[seq] = first
        self._drop(self._table[seq, old:first])

    def _blocks_wanted(self, growth: Mapping[int, int], lengths: Sequence[int]) -> int:
        new = sum(blocks_in(lengths[seq] + n) - blocks_in(lengths[seq]) for seq, n in growth.items())
        # Of the holders of a block that all write to it, the last one keeps it.
        writers = Counter(
            int(self._table[seq, lengths[seq] // BLOCK]) for seq in growth if self._shares_last_block(seq, lengths[seq])
        )
        return new + sum(min(n, int(self._references[block]) - 1) for block, n in writers.items())

    def _shares_last_block(self, seq: int, length: int) -> bool:
        """The next position falls into a block that another sequence holds too."""
        return bool(length % BLOCK) and bool(self._references[self._table[seq, length // BLOCK]] > 1)

    def _own_last_block(self, seq: int, length: int) -> None:
        if not self._shares_last_block(seq, length):
            return
        index = length // BLOCK
        old, new = self._table[seq, index : index + 1].copy(), self._take()
        for memory in self._memory:
            memory[:, new] = memory[:, old[0]]
        self._table[seq, index] = new
        self._drop(old)

    def _take(self) -> int:
        block = self._free.pop()
        self._references[block] = 1
        return block

    def _drop(self, blocks: NDArray[np.int32]) -> None:
        for block in blocks.tolist():
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)
