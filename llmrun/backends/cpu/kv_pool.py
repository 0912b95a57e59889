"""A pool of KV cache blocks for all layers with the same sliding window.

Blocks are reference-counted. Sharing a prefix copies only part of a block table. A block that several sequences share
is copied before one of them writes to it. With a sliding window, a sequence keeps its most recent blocks and releases
older ones as it grows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from llmrun.base.errors import KVFull
from llmrun.formats.layouts.kv_blocks import BLOCK

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A sequence can be truncated by this many tokens, in addition to those of its last step, without losing its window.
# Chats truncate when they retry, or when an answer is rendered differently from how it was generated. llama.cpp uses
# the same value.
_CUT_BACK: Final = 256


def blocks_in(tokens: int) -> int:
    return -(-tokens // BLOCK)


def blocks_of_window(window: int, max_rows: int) -> int:
    """Return the number of blocks that a sequence keeps for a sliding window.

    The blocks hold all positions that the rows of a step (at most `max_rows`) attend to, and the older positions that
    are needed again after a truncation. The result allows for the first of these positions being anywhere in its block.
    """
    return blocks_in(window - 1 + max_rows + _CUT_BACK + BLOCK - 1)


def blocks_of_sequence(window: int, context_size: int, max_rows: int) -> int:
    """Return the maximum number of blocks in a sequence. A `window` of 0 means that rows attend to all positions."""
    whole = blocks_in(context_size)
    return min(whole, blocks_of_window(window, max_rows)) if window else whole


class BlockPool:
    """Maps the positions of sequences to blocks of memory.

    window  number of positions that a row attends to, including its own, or 0 for all
    memory  uint8[layers, blocks, bytes per block] for each group of layers
    table   int32[sequences, blocks per context], the block tables that kernels read

    With a window, each sequence has an equal share of the blocks, so the pool is never full.
    """

    def __init__(self, window: int, memory: Sequence[NDArray[np.uint8]], table: NDArray[np.int32]) -> None:
        n_blocks = memory[0].shape[1]
        self.window = window
        self._memory = memory
        self._table = table
        self._share = n_blocks // len(table) if window else table.shape[1]
        self._firsts = [0] * len(table)  # the index of the first block that each sequence still holds
        self._references = np.zeros(n_blocks, np.int32)
        self._free = list(range(n_blocks - 1, -1, -1))

    @property
    def n_blocks(self) -> int:
        return len(self._references)

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def needed(self, seq: int, length: int, n: int) -> int:
        """Return how many blocks a sequence of `length` positions takes to grow to n, including the copy of a block."""
        new = max(0, blocks_in(n) - blocks_in(length))
        return new + (n > length and self._shares_last_block(seq, length))

    def held(self, sequences: Sequence[int], lengths: Sequence[int]) -> int:
        """Return how many blocks only these sequences hold."""
        tables = [self._table[seq, self._firsts[seq] : blocks_in(lengths[seq])] for seq in sequences]
        if not tables:
            return 0
        blocks, counts = np.unique(np.concatenate(tables), return_counts=True)
        return int(np.count_nonzero(self._references[blocks] == counts))

    def reaches(self, seq: int, n: int) -> bool:
        """Return whether every position visible to rows after the first n is still cached."""
        first = self._firsts[seq]
        return first == 0 or first * BLOCK <= n - self.window + 1

    def share(self, src: int, dst: int, n: int) -> None:
        """Share the first n positions of src with dst. dst must be empty, and `reaches(src, n)` must be true."""
        first = self._firsts[src]
        shared = self._table[src, first : blocks_in(n)]
        self._table[dst, first : blocks_in(n)] = shared
        self._firsts[dst] = first
        self._references[shared] += 1

    def cut(self, seq: int, length: int, n: int) -> None:
        """Keep only the first n of a sequence's `length` positions. n must be 0, or `reaches(seq, n)` must be true."""
        first = max(self._firsts[seq], blocks_in(n))
        if n == 0:
            self._firsts[seq] = 0
        self._drop(self._table[seq, first : blocks_in(length)])

    @property
    def block_bytes(self) -> int:
        """The size of a block in all layers."""
        return sum(memory.shape[0] * memory.shape[2] for memory in self._memory)

    def holds(self, seq: int, index: int) -> bool:
        """Return whether a sequence still holds its block at this index, which must not be beyond its end."""
        return index >= self._firsts[seq]

    def read_block(self, seq: int, index: int) -> NDArray[np.uint8]:
        """Return a copy of a block in all layers, uint8[block_bytes]."""
        block = self._table[seq, index]
        return np.concatenate([memory[:, block].reshape(-1) for memory in self._memory])

    def load_block(self, seq: int, index: int, data: NDArray[np.uint8] | None, end: int) -> None:
        """Append a block, uint8[block_bytes], to a sequence of `index` blocks that will have `end` blocks.

        Blocks that will have left the sliding window by then are not stored. Without data, the sequence forgets
        everything up to this block. Call `require` first.
        """
        if data is None or index < end - self._share:
            self._drop(self._table[seq, self._firsts[seq] : index])
            self._firsts[seq] = index + 1
            return
        block = self._table[seq, index] = self._take()
        for memory in self._memory:
            part, data = np.split(data, [memory.shape[0] * memory.shape[2]])
            memory[:, block] = part.reshape(len(memory), -1)

    def require(self, growth: Mapping[int, int], lengths: Sequence[int]) -> None:
        """Raise KVFull if there is no room for `growth[seq]` more positions in each sequence."""
        if self.window:
            return
        wanted = self._blocks_wanted(growth, lengths)
        if wanted > len(self._free):
            raise KVFull(
                f"KV cache is full: {wanted} more blocks of {BLOCK} tokens needed, {len(self._free)} of "
                f"{self.n_blocks} free"
            )

    def extend(self, seq: int, length: int, n: int) -> None:
        """Add blocks for n positions after `length`, and release the blocks that have left the sliding window.

        Call `require` first.
        """
        end = blocks_in(length + n)
        self._give_back(seq, end - self._share, length)
        self._own_last_block(seq, length)
        for index in range(blocks_in(length), end):
            self._table[seq, index] = self._take()

    def _give_back(self, seq: int, first: int, length: int) -> None:
        """Release the blocks of a sequence whose index is less than `first`."""
        old = self._firsts[seq]
        if first <= old:
            return
        assert first * BLOCK <= length - self.window + 1, "the step has more rows than the cache has blocks for"
        self._firsts[seq] = first
        self._drop(self._table[seq, old:first])

    def _blocks_wanted(self, growth: Mapping[int, int], lengths: Sequence[int]) -> int:
        new = sum(blocks_in(lengths[seq] + n) - blocks_in(lengths[seq]) for seq, n in growth.items())
        # If all sequences that share a block write to it, the last one keeps the block and each of the others needs a
        # copy.
        writers = Counter(
            int(self._table[seq, lengths[seq] // BLOCK]) for seq in growth if self._shares_last_block(seq, lengths[seq])
        )
        return new + sum(min(n, int(self._references[block]) - 1) for block, n in writers.items())

    def _shares_last_block(self, seq: int, length: int) -> bool:
        """Return whether the next position is in a block that is shared with another sequence."""
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
