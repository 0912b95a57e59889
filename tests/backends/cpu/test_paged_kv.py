"""Tests of the paged cache against a naive one, with any mix of copies, truncations and frees."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llmrun.base.errors import KVFull
from llmrun.formats.layouts.kv import BLOCK
from tests.support.backends.paged_memory import PagedCache, blocks_of
from tests.support.tiers import examples

SEQUENCES = 4
CONTEXT = 3 * BLOCK - 5


def cache_of(n_blocks: int, max_sequences: int = SEQUENCES, context: int = CONTEXT) -> PagedCache:
    """Return a cache without windows."""
    return PagedCache({0: n_blocks}, max_sequences, context)


def read(cache: PagedCache, seq: int) -> list[int]:
    return cache.read(0, seq, range(cache.kv.lengths[seq]))


class PagedKVMachine(RuleBasedStateMachine):
    """A state machine that compares the cache with a token list per sequence.

    It counts blocks by the contents that they would have to hold.
    """

    @initialize(n_blocks=st.integers(1, SEQUENCES * 3))
    def open(self, n_blocks: int) -> None:
        self.cache = cache_of(n_blocks)
        self.tokens: list[list[int]] = [[] for _ in range(SEQUENCES)]
        self.next = 0

    def fresh(self, count: int) -> list[int]:
        self.next += count
        return [(self.next + i) % 65521 for i in range(count)]

    @rule(growth=st.dictionaries(st.integers(0, SEQUENCES - 1), st.integers(1, 50), min_size=1))
    def extend(self, growth: dict[int, int]) -> None:
        growth = {seq: min(n, CONTEXT - len(self.tokens[seq])) for seq, n in growth.items()}
        new = {seq: self.fresh(n) for seq, n in growth.items() if n}
        if not new:
            return
        before = self.state()
        if self.blocks_after(new) > self.cache.pool(0).n_blocks:
            for act in (self.cache.kv.require, self.cache.kv.extend):
                with pytest.raises(KVFull):
                    act({seq: len(tokens) for seq, tokens in new.items()})
            assert self.state() == before
            return
        self.cache.step(new)
        for seq, tokens in new.items():
            self.tokens[seq] = self.tokens[seq] + tokens

    def blocks_after(self, new: dict[int, list[int]]) -> int:
        """Return the number of blocks the cache must hold after an append, if it shares as many as possible."""
        writers, readers = Counter[int](), set[int]()
        for seq, tokens in enumerate(self.tokens):
            for index, block in enumerate(self.cache.held_blocks(0, seq)):
                if seq in new and index == len(tokens) // BLOCK:
                    writers[block] += 1
                else:
                    readers.add(block)
        lengths = {seq: len(self.tokens[seq]) for seq in new}
        added = sum(blocks_of(lengths[seq] + len(tokens)) - blocks_of(lengths[seq]) for seq, tokens in new.items())
        return len(readers) + writers.total() + added

    def state(self) -> object:
        kv = self.cache.kv
        tokens = [read(self.cache, seq) for seq in range(SEQUENCES)]
        return tokens, kv.lengths.copy(), [self.cache.held_blocks(0, seq) for seq in range(SEQUENCES)]

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
        assert [read(self.cache, seq) for seq in range(SEQUENCES)] == self.tokens

    @invariant()
    def blocks_are_counted(self) -> None:
        assert_blocks_counted(self.cache, SEQUENCES)


def assert_blocks_counted(cache: PagedCache, max_sequences: int) -> None:
    """Assert that reference counts match the tables, and that exactly the unreferenced blocks are free."""
    for window in cache.memory:
        pool = cache.pool(window)
        counted = Counter(block for seq in range(max_sequences) for block in cache.held_blocks(window, seq))
        assert {block: int(n) for block, n in enumerate(pool._references) if n} == counted
        assert len(set(pool._free)) == len(pool._free)
        assert set(pool._free) == set(range(pool.n_blocks)) - set(counted)


PagedKVMachine.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=30)
TestPagedKV = pytest.mark.push(PagedKVMachine.TestCase)


def test_capacity_counts_tokens_of_all_blocks() -> None:
    assert cache_of(5).kv.capacity == 5 * BLOCK


def test_a_shared_prefix_takes_no_memory_until_it_is_written_on() -> None:
    cache = cache_of(2, max_sequences=3)
    cache.step({0: list(range(40))})
    cache.kv.copy(0, 1, 40)
    cache.kv.copy(0, 2, 33)
    assert len({block for seq in range(3) for block in cache.held_blocks(0, seq)}) == 2
    with pytest.raises(KVFull, match="1 more blocks of 32 tokens needed, 0 of 2 free"):
        cache.step({1: [7]})
    assert read(cache, 1) == list(range(40))


def test_a_block_shared_up_to_its_border_is_not_copied() -> None:
    cache = cache_of(3, max_sequences=2)
    cache.step({0: list(range(BLOCK))})
    cache.kv.copy(0, 1, BLOCK)
    cache.step({0: [100], 1: [200]})
    assert cache.held_blocks(0, 0)[0] == cache.held_blocks(0, 1)[0]
    assert (read(cache, 0)[-1], read(cache, 1)[-1]) == (100, 200)


def test_the_last_writer_of_a_shared_block_keeps_it() -> None:
    """Two sequences with a context of one block fill a cache of two blocks, whatever they shared before."""
    cache = cache_of(2, max_sequences=2, context=BLOCK)
    cache.step({0: [1, 2, 3]})
    cache.kv.copy(0, 1, 3)
    cache.step({0: [4], 1: [5]})
    assert (read(cache, 0), read(cache, 1)) == ([1, 2, 3, 4], [1, 2, 3, 5])


def test_copying_onto_itself_truncates() -> None:
    cache = cache_of(2)
    cache.step({0: list(range(40))})
    assert cache.kv.copy(0, 0, 20) == 20
    assert read(cache, 0) == list(range(20))


def test_tables_are_addressed_by_window_and_row() -> None:
    cache = PagedCache({0: 6, 5: 6}, 2, CONTEXT)
    cache.step({1: list(range(40))})
    found = cache.kv.table_addresses(np.array([1, 0, 1], np.int32))
    assert found.dtype == np.int64
    assert found.flags.c_contiguous
    expected = [[cache.kv.tables[window, seq].ctypes.data for seq in (1, 0, 1)] for window in range(2)]
    assert found.tolist() == expected
