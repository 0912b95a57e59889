"""The paged cache against a naive one: whatever is copied, truncated and freed, every sequence reads its own tokens."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llmrun.backends.paged_kv import PagedKV
from llmrun.errors import KVFull
from llmrun.kernels.kv_layout import BLOCK

LAYERS = 2
SEQUENCES = 4
CONTEXT = 3 * BLOCK - 5


def blocks_of(tokens: list[int]) -> int:
    return -(-len(tokens) // BLOCK)


class PagedCache:
    """PagedKV over memory in which a position is one byte per layer: what a kernel would write and read."""

    def __init__(self, n_blocks: int, max_sequences: int = SEQUENCES, context: int = CONTEXT) -> None:
        self.memory = np.zeros((LAYERS, n_blocks, BLOCK), np.uint8)
        self.kv = PagedKV(self.memory, max_sequences, context)

    def append(self, tokens: dict[int, list[int]]) -> None:
        starts = {seq: self.kv.lengths[seq] for seq in tokens}
        self.kv.extend({seq: len(new) for seq, new in tokens.items()})
        for seq, new in tokens.items():
            for offset, token in enumerate(new):
                block, slot = divmod(starts[seq] + offset, BLOCK)
                self.memory[:, self.kv.tables[seq, block], slot] = token, 255 - token

    def read(self, seq: int) -> list[int]:
        length = self.kv.lengths[seq]
        blocks = self.memory[:, self.kv.tables[seq]].reshape(LAYERS, -1)[:, :length]
        np.testing.assert_array_equal(blocks[1], 255 - blocks[0])
        return [int(token) for token in blocks[0]]

    @property
    def held_blocks(self) -> set[int]:
        """Blocks that some sequence's table points to."""
        tables = zip(self.kv.tables, self.kv.lengths, strict=True)
        return {int(block) for table, length in tables for block in table[: -(-length // BLOCK)]}


class PagedKVMachine(RuleBasedStateMachine):
    """Naive: a list of tokens a sequence. Blocks are counted by the contents they would have to hold."""

    @initialize(n_blocks=st.integers(1, SEQUENCES * 3))
    def open(self, n_blocks: int) -> None:
        self.cache = PagedCache(n_blocks)
        self.tokens: list[list[int]] = [[] for _ in range(SEQUENCES)]
        self.next = 0

    def fresh(self, count: int) -> list[int]:
        self.next += count
        return [(self.next + i) % 251 for i in range(count)]

    @rule(growth=st.dictionaries(st.integers(0, SEQUENCES - 1), st.integers(1, 50), min_size=1))
    def extend(self, growth: dict[int, int]) -> None:
        growth = {seq: min(n, CONTEXT - len(self.tokens[seq])) for seq, n in growth.items()}
        new = {seq: self.fresh(n) for seq, n in growth.items() if n}
        if not new:
            return
        before = self.state()
        if self.blocks_after(new) > len(self.cache.memory[0]):
            with pytest.raises(KVFull):
                self.cache.append(new)
            assert self.state() == before
            return
        self.cache.append(new)
        for seq, tokens in new.items():
            self.tokens[seq] = self.tokens[seq] + tokens

    def blocks_after(self, new: dict[int, list[int]]) -> int:
        """Blocks the cache must hold after an append, if it shares as much as it can."""
        writers, readers = Counter[int](), set[int]()
        for seq, tokens in enumerate(self.tokens):
            for index, block in enumerate(self.cache.kv.tables[seq, : blocks_of(tokens)].tolist()):
                if seq in new and index == len(tokens) // BLOCK:
                    writers[block] += 1
                else:
                    readers.add(block)
        added = sum(blocks_of(self.tokens[seq] + tokens) - blocks_of(self.tokens[seq]) for seq, tokens in new.items())
        return len(readers) + writers.total() + added

    def state(self) -> object:
        kv = self.cache.kv
        return [self.cache.read(seq) for seq in range(SEQUENCES)], kv.lengths.copy(), self.cache.held_blocks

    @rule(src=st.integers(0, SEQUENCES - 1), dst=st.integers(0, SEQUENCES - 1), n=st.integers(0, CONTEXT))
    def copy(self, src: int, dst: int, n: int) -> None:
        kept = self.cache.kv.copy(src, dst, n)
        assert kept == min(n, len(self.tokens[src]))
        self.tokens[dst] = self.tokens[src][:n]

    @rule(seq=st.integers(0, SEQUENCES - 1), n=st.integers(0, CONTEXT))
    def truncate(self, seq: int, n: int) -> None:
        assert self.cache.kv.truncate(seq, n) == min(n, len(self.tokens[seq]))
        self.tokens[seq] = self.tokens[seq][:n]

    @precondition(lambda self: any(self.tokens))
    @rule(seq=st.integers(0, SEQUENCES - 1))
    def free(self, seq: int) -> None:
        self.cache.kv.free(seq)
        self.tokens[seq] = []

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        assert [self.cache.read(seq) for seq in range(SEQUENCES)] == self.tokens

    @invariant()
    def references_count_the_tables(self) -> None:
        kv = self.cache.kv
        counted = np.zeros_like(kv._references)
        for seq in range(SEQUENCES):
            for block in kv.tables[seq, : -(-kv.lengths[seq] // BLOCK)]:
                counted[block] += 1
        np.testing.assert_array_equal(kv._references, counted)

    @invariant()
    def a_block_is_free_exactly_when_nobody_holds_it(self) -> None:
        kv = self.cache.kv
        free = set(kv._free)
        assert len(free) == len(kv._free)
        assert free | self.cache.held_blocks == set(range(len(kv._references)))
        assert not free & self.cache.held_blocks


PagedKVMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
TestPagedKV = PagedKVMachine.TestCase


def test_capacity_counts_tokens_of_all_blocks() -> None:
    assert PagedCache(5).kv.capacity == 5 * BLOCK


def test_a_shared_prefix_takes_no_memory_until_it_is_written_on() -> None:
    cache = PagedCache(2, max_sequences=3)
    cache.append({0: list(range(40))})
    cache.kv.copy(0, 1, 40)
    cache.kv.copy(0, 2, 33)
    assert len(cache.held_blocks) == 2
    with pytest.raises(KVFull, match="1 more blocks of 32 tokens wanted, 0 free of 2"):
        cache.append({1: [7]})
    assert cache.read(1) == list(range(40))


def test_a_block_shared_up_to_its_border_is_not_copied() -> None:
    cache = PagedCache(3, max_sequences=2)
    cache.append({0: list(range(BLOCK))})
    cache.kv.copy(0, 1, BLOCK)
    cache.append({0: [100], 1: [200]})
    assert cache.kv.tables[0, 0] == cache.kv.tables[1, 0]
    assert (cache.read(0)[-1], cache.read(1)[-1]) == (100, 200)


def test_the_last_writer_of_a_shared_block_keeps_it() -> None:
    """Two sequences of a context of one block fill a cache of two, whatever they shared before."""
    cache = PagedCache(2, max_sequences=2, context=BLOCK)
    cache.append({0: [1, 2, 3]})
    cache.kv.copy(0, 1, 3)
    cache.append({0: [4], 1: [5]})
    assert (cache.read(0), cache.read(1)) == ([1, 2, 3, 4], [1, 2, 3, 5])


def test_copying_onto_itself_truncates() -> None:
    cache = PagedCache(2)
    cache.append({0: list(range(40))})
    assert cache.kv.copy(0, 0, 20) == 20
    assert cache.read(0) == list(range(20))
