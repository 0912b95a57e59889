"""The paged KV cache, which maps the positions of each sequence to blocks in memory that the caller owns.

Layers with the same sliding window share a pool of blocks. With a window, a sequence keeps its most recent blocks and
releases older blocks as it grows. A sequence can be truncated only to a position whose whole window is still cached. If
the model has recurrent layers, their state at that position must also be available (recurrent_states.py). The windows
of short convolutions can be restored at the ends of images (convolution_checkpoints.py).

Blocks are reference-counted. Sharing a prefix copies only part of a block table. A block that several sequences share
is copied before one of them writes to it.

A saved part contains one block of every pool. Pools of layers with a sliding window release the old blocks of a
sequence, so its parts lack these blocks. Bit i of `contents` is set if the part contains a block of pool i.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from llmrun.backends.base import BLOCK_PART, SavedPart
from llmrun.backends.cpu.recurrent_states import RecurrentStates
from llmrun.base.errors import IntegrityError, KVFull
from llmrun.base.machine.memory import return_pages
from llmrun.formats.layouts.arena import address_of
from llmrun.formats.layouts.kv import BLOCK
from llmrun.model.plan.shapes import ConvolutionShape

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.cpu.convolution_checkpoints import ConvolutionCheckpoints
    from llmrun.model.plan.plan import Plan

# A sequence can be truncated by its last step and this many more tokens without losing its window.
# Chats truncate when they retry, or when an answer is rendered differently from how it was generated. llama.cpp uses
# the same number of tokens.
_CUT_BACK: Final = 256


def blocks_in(tokens: int) -> int:
    return -(-tokens // BLOCK)


def blocks_of_window(window: int, max_rows: int) -> int:
    """Return the number of blocks that a sequence keeps for a sliding window.

    The blocks hold all positions that the rows of a step (at most `max_rows`) attend to, and the older positions that
    are needed again after a truncation. The result allows the first of these positions to be anywhere in its block.
    """
    return blocks_in(window - 1 + max_rows + _CUT_BACK + BLOCK - 1)


def blocks_of_sequence(window: int, context_size: int, max_rows: int) -> int:
    """Return the maximum number of blocks in a sequence. A `window` of 0 means that rows attend to all positions."""
    whole = blocks_in(context_size)
    return min(whole, blocks_of_window(window, max_rows)) if window else whole


def convolution_windows(plan: Plan) -> set[int]:
    """Return the windows of the layers of short convolutions, unless layers with attention have the same window."""
    kinds: dict[int, set[type]] = {}
    for group in plan.groups:
        kinds.setdefault(group.shape.window, set()).add(type(group.shape))
    return {window for window, found in kinds.items() if found == {ConvolutionShape}}


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
        self._starts = [0] * len(table)  # the first position that each sequence still holds
        self._references = np.zeros(n_blocks, np.int32)
        self._free = list(range(n_blocks - 1, -1, -1))

    @property
    def n_blocks(self) -> int:
        return len(self._references)

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def needed(self, seq: int, length: int, n: int) -> int:
        """Return how many blocks a sequence of `length` positions needs to grow to n, including a block to copy."""
        new = max(0, blocks_in(n) - blocks_in(length))
        return new + (n > length and self._shares_last_block(seq, length))

    def held(self, sequences: Sequence[int], lengths: Sequence[int]) -> int:
        """Return the number of blocks that only these sequences hold."""
        tables = [self._table[seq, self._first(seq) : blocks_in(lengths[seq])] for seq in sequences]
        if not tables:
            return 0
        blocks, counts = np.unique(np.concatenate(tables), return_counts=True)
        return int(np.count_nonzero(self._references[blocks] == counts))

    def reaches(self, seq: int, n: int) -> bool:
        """Return whether every position visible to rows after the first n is still cached."""
        return self._starts[seq] <= max(0, n - self.window + 1)

    def share(self, src: int, dst: int, n: int) -> None:
        """Share the first n positions of src with dst. dst must be empty, and `reaches(src, n)` must be true."""
        first = self._first(src)
        shared = self._table[src, first : blocks_in(n)]
        self._table[dst, first : blocks_in(n)] = shared
        self._starts[dst] = self._starts[src]
        self._references[shared] += 1

    def cut(self, seq: int, length: int, n: int) -> None:
        """Keep only the first n of a sequence's `length` positions. n must be 0, or `reaches(seq, n)` must be true."""
        first = max(self._first(seq), blocks_in(n))
        if n == 0:
            self._starts[seq] = 0
        self._drop(self._table[seq, first : blocks_in(length)])

    @property
    def before_bytes(self) -> int:
        """The size of the earlier positions that a row depends on, in layers of short convolutions."""
        return self.block_bytes // BLOCK * (self.window - 1)

    def read_before(self, seq: int, n: int) -> NDArray[np.uint8]:
        """Return the earlier positions that the row at n depends on, uint8[before_bytes]. `reaches` must be true."""
        parts = [self._position(memory, seq, at) for at in self._before(n) for memory in self._memory]
        data = np.concatenate([part.reshape(-1) for part in parts])
        return np.pad(data, (0, self.before_bytes - len(data)))

    def restore_before(self, seq: int, length: int, n: int, data: NDArray[np.uint8]) -> None:
        """Replace a sequence of `length` positions by n positions, of which only the last ones are stored.

        data  the result of `read_before`
        """
        self.cut(seq, length, 0)
        self._starts[seq] = self._before(n).start
        for index in range(self._first(seq), blocks_in(n)):
            self._table[seq, index] = self._take()
        for at in self._before(n):
            for memory in self._memory:
                place = self._position(memory, seq, at)
                place[:], data = data[: place.size].reshape(place.shape), data[place.size :]

    def _before(self, n: int) -> range:
        return range(max(0, n - self.window + 1), n)

    def _position(self, memory: NDArray[np.uint8], seq: int, at: int) -> NDArray[np.uint8]:
        """Return a view of a position in layers whose blocks have one row per position, uint8[layers, bytes]."""
        row_bytes = memory.shape[2] // BLOCK
        first = at % BLOCK * row_bytes
        return memory[:, self._table[seq, at // BLOCK], first : first + row_bytes]

    def _first(self, seq: int) -> int:
        """Return the index of the first block that a sequence still holds."""
        return self._starts[seq] // BLOCK

    @property
    def block_bytes(self) -> int:
        """The size of a block in all layers."""
        return sum(memory.shape[0] * memory.shape[2] for memory in self._memory)

    def holds(self, seq: int, index: int) -> bool:
        """Return whether a sequence still holds its whole block at this index, which must be within the sequence."""
        return index * BLOCK >= self._starts[seq]

    def read_block(self, seq: int, index: int) -> NDArray[np.uint8]:
        """Return a copy of a block in all layers, uint8[block_bytes]."""
        block = self._table[seq, index]
        return np.concatenate([memory[:, block].reshape(-1) for memory in self._memory])

    def load_block(self, seq: int, index: int, data: NDArray[np.uint8] | None, end: int) -> None:
        """Append a block, uint8[block_bytes], to a sequence of `index` blocks that will have `end` blocks.

        Blocks outside the sliding window of the last position are not stored. Without data, the sequence discards all
        positions up to the end of this block. Call `require` first.
        """
        if data is None or index < end - self._share:
            self._drop(self._table[seq, self._first(seq) : index])
            self._starts[seq] = (index + 1) * BLOCK
            return
        block = self._table[seq, index] = self._take()
        for memory in self._memory:
            part, data = np.split(data, [memory.shape[0] * memory.shape[2]])
            memory[:, block] = part.reshape(len(memory), -1)

    def return_free_memory(self) -> None:
        """Return the memory of free blocks to the system."""
        free = np.sort(np.array(self._free, np.int64))
        for run in np.split(free, np.flatnonzero(np.diff(free) > 1) + 1) if len(free) else ():
            for layer in (layer for memory in self._memory for layer in memory):
                blocks = layer[run[0] : run[-1] + 1]
                return_pages(address_of(blocks), blocks.nbytes)

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
        old = self._first(seq)
        if first <= old:
            return
        assert first * BLOCK <= length - self.window + 1, "the step has more rows than the cache has blocks for"
        self._starts[seq] = first * BLOCK
        self._drop(self._table[seq, old:first])

    def _blocks_wanted(self, growth: Mapping[int, int], lengths: Sequence[int]) -> int:
        new = sum(blocks_in(lengths[seq] + n) - blocks_in(lengths[seq]) for seq, n in growth.items())
        # If all sequences that share a block write to it, the last sequence keeps the block and every other sequence
        # needs a copy.
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


def saved_blocks(pools: Sequence[BlockPool], seq: int, n: int) -> list[SavedPart]:
    """Return the first n positions of a sequence as parts, whose data is read on demand."""
    parts = []
    for index in range(blocks_in(n)):
        held = [number for number, pool in enumerate(pools) if pool.holds(seq, index)]
        n_bytes = sum(pools[number].block_bytes for number in held)
        read = partial(_read, [pools[number] for number in held], seq, index)
        contents = sum(1 << number for number in held)
        parts.append(SavedPart(BLOCK_PART, index * BLOCK, min(n, (index + 1) * BLOCK), contents, n_bytes, read))
    return parts


def _read(pools: Sequence[BlockPool], seq: int, index: int) -> memoryview:
    return np.concatenate([pool.read_block(seq, index) for pool in pools]).data


def consecutive_blocks(parts: Iterable[SavedPart], context_size: int) -> list[SavedPart]:
    """Return the leading parts, as long as each part continues the previous part and fits in the context."""
    found: list[SavedPart] = []
    for part in parts:
        if part.kind != BLOCK_PART:
            continue
        end = found[-1].end if found else 0
        fits = part.start == end and end % BLOCK == 0 and 0 < part.end - end <= BLOCK and part.end <= context_size
        if not fits:
            break
        found.append(part)
    return found


def load_block(pools: Sequence[BlockPool], seq: int, part: SavedPart, n: int) -> None:
    """Append a block to a sequence of `part.start` positions, which grows to n positions.

    Raises IntegrityError if the part is damaged, or if its size or contents are impossible. An error leaves the pools
    unchanged.
    """
    index = part.start // BLOCK
    inside = [part.contents >> number & 1 for number in range(len(pools))]
    n_bytes = sum(pool.block_bytes for pool, is_inside in zip(pools, inside, strict=True) if is_inside)
    if part.contents >> len(pools) or part.n_bytes != n_bytes:
        raise IntegrityError(f"a saved block has {part.n_bytes:,} bytes, expected {n_bytes:,}")
    if not all(is_inside or pool.window for pool, is_inside in zip(pools, inside, strict=True)):
        raise IntegrityError("a saved block lacks the keys and values of some layers")
    data = np.frombuffer(part.read(), np.uint8)
    for pool, is_inside in zip(pools, inside, strict=True):
        block: NDArray[np.uint8] | None = None
        if is_inside:
            block, data = data[: pool.block_bytes], data[pool.block_bytes :]
        pool.load_block(seq, index, block, blocks_in(n))


class PagedKV:
    """A KVCache in memory that the caller owns.

    `memory` maps each window to arrays of uint8[layers, blocks, bytes per block], one array per group of layers. A
    window of 0 means that all positions are kept. `states` are the recurrent states, or None if the model has none.
    `convolutions` are the windows of layers of short convolutions, if their inputs are saved after images.

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
        convolutions: Collection[int] = (),
    ) -> None:
        self.key = key
        self._context_size = context_size
        self.lengths = [0] * max_sequences
        self.tables = np.zeros((len(memory), max_sequences, blocks_in(context_size)), np.int32)
        self._pools = [
            BlockPool(window, groups, table)
            for (window, groups), table in zip(memory.items(), self.tables, strict=True)
        ]
        self.convolutions: ConvolutionCheckpoints | None = None
        if convolutions:
            from llmrun.backends.cpu.convolution_checkpoints import ConvolutionCheckpoints

            pools = [pool for pool in self._pools if pool.window in convolutions]
            self.convolutions = ConvolutionCheckpoints(pools, max_sequences)
        self.states = states or self.convolutions
        self._addresses = np.array([address_of(table) for table in self.tables], np.int64).reshape(-1, 1)
        # Only the pools without a window can be full.
        self._whole = [pool for window, pool in zip(memory, self._pools, strict=True) if not window]
        self._n_blocks = min((pool.n_blocks for pool in self._whole), default=max_sequences * self.tables.shape[2])

    @property
    def capacity(self) -> int:
        """The total number of tokens that fit in the cache.

        Sliding windows do not limit the capacity, because each sequence has its own share of their blocks.
        """
        return self._n_blocks * BLOCK

    @property
    def free_blocks(self) -> int:
        """The number of blocks that no sequence holds."""
        return min((pool.free_blocks for pool in self._whole), default=self._n_blocks)

    def needed(self, seq: int, n: int) -> int:
        """Return how many free blocks a sequence needs to grow to n tokens."""
        length = self.lengths[seq]
        return max((pool.needed(seq, length, n) for pool in self._whole), default=0)

    def held(self, sequences: Sequence[int]) -> int:
        """Return how many blocks become free if these sequences are freed."""
        return min((pool.held(sequences, self.lengths) for pool in self._whole), default=0)

    def copy(self, src: int, dst: int, n: int) -> int:
        """Copy the first n positions from one sequence to another, and return the number of positions kept.

        The result is n, or the sequence's length if that is smaller. If the recurrent state at this position is not
        available, the result is the position of an earlier checkpoint. A position counts only if the windows that end
        there are still complete. If no position counts, the result is 0. `truncate` follows the rules of `copy`.
        """
        if src == dst:
            return self.truncate(dst, n)
        self.free(dst)
        kept = self._kept(src, n)
        if kept:
            for pool in self._pools:
                if (inputs := self._inputs(pool, src, kept)) is not None:
                    pool.restore_before(dst, 0, kept, inputs)
                else:
                    pool.share(src, dst, kept)
            if self.states is not None:
                self.states.share(src, dst, kept)
            self.lengths[dst] = kept
        return kept

    def truncate(self, seq: int, n: int) -> int:
        kept = self._kept(seq, n)
        for pool in self._pools:
            if (inputs := self._inputs(pool, seq, kept)) is not None:
                pool.restore_before(seq, self.lengths[seq], kept, inputs)
            else:
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

    def return_free_memory(self) -> None:
        for pool in self._pools:
            pool.return_free_memory()

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

        Positions outside the windows of the new positions may be dropped. Raises KVFull before anything changes.
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
        for at in positions:
            if all(pool.reaches(seq, at) or self._inputs(pool, seq, at) is not None for pool in self._pools):
                return at
        return 0

    def _inputs(self, pool: BlockPool, seq: int, n: int) -> NDArray[np.uint8] | None:
        """Return the saved inputs before position n, or None if the pool still holds them or nothing is saved."""
        return None if self.convolutions is None or pool.reaches(seq, n) else self.convolutions.inputs(pool, seq, n)
