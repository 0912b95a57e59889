"""Tests of the windowed cache against a naive one: rows find all that they may see, and `kept` is correct."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from llmrun.backends.cpu.paged_kv import blocks_of_sequence
from llmrun.base.errors import KVFull
from llmrun.formats.layouts.kv import BLOCK
from tests.backends.cpu.test_paged_kv import assert_blocks_counted
from tests.support.backends.paged_memory import PagedCache, blocks_of
from tests.support.tiers import examples

SEQUENCES = 3
MAX_ROWS = 48
CONTEXT = 1000
WINDOWS = (0, 2, 4, 32, 33, 34, 100, 700)
CUT_BACK = 256  # tokens that can be truncated besides those of one step


def shares_of(windows: tuple[int, ...], context: int = CONTEXT) -> dict[int, int]:
    """Return the number of blocks per sequence for each window."""
    return {window: blocks_of_sequence(window, context, MAX_ROWS) for window in windows}


def cache_of(*windows: int, max_sequences: int = SEQUENCES, context: int = CONTEXT) -> PagedCache:
    shares = shares_of(windows, context)
    return PagedCache({window: max_sequences * share for window, share in shares.items()}, max_sequences, context)


def run(cache: PagedCache, seq: int, tokens: list[int]) -> None:
    """Append tokens in steps; each step checks what its rows see."""
    start = cache.kv.lengths[seq]
    for at in range(0, len(tokens), MAX_ROWS):
        cache.step({seq: tokens[at : at + MAX_ROWS]})
    assert cache.kv.lengths[seq] == start + len(tokens)


class WindowMachine(RuleBasedStateMachine):
    """Compares the cache with the tokens of each sequence and the set of positions that each window still holds."""

    @initialize(windows=st.lists(st.sampled_from(WINDOWS), min_size=1, max_size=3, unique=True))
    def open(self, windows: list[int]) -> None:
        self.shares = shares_of(tuple(windows))
        self.cache = cache_of(*windows)
        self.tokens: list[list[int]] = [[] for _ in range(SEQUENCES)]
        self.held: dict[tuple[int, int], set[int]] = {(w, seq): set() for w in windows for seq in range(SEQUENCES)}
        self.next = 0

    # --- the naive cache ---

    def grow(self, growth: Mapping[int, int]) -> None:
        new = {}
        for seq, n in growth.items():
            new[seq] = [(self.next + i) % 65521 for i in range(n)]
            self.next += n
        self.cache.step(new)
        for seq, tokens in new.items():
            start = len(self.tokens[seq])
            self.tokens[seq] = self.tokens[seq] + tokens
            end = len(self.tokens[seq])
            for window, share in self.shares.items():
                held = self.held[window, seq]
                held |= set(range(start, end))
                held -= set(range((blocks_of(end) - share) * BLOCK))
                for row in (start, end - 1):
                    self.assert_sees(window, seq, row)

    def assert_sees(self, window: int, seq: int, row: int) -> None:
        """Assert that a row of the last step sees all that its window covers."""
        seen = range(max(0, row - window + 1) if window else 0, row + 1)
        assert set(seen) <= self.held[window, seq]
        assert self.cache.read(window, seq, seen) == self.tokens[seq][seen.start : seen.stop]

    def kept(self, seq: int, n: int) -> int:
        n = min(n, len(self.tokens[seq]))
        seen = {window: range(max(0, n - window + 1) if window else 0, n) for window in self.shares}
        return n if all(set(seen[window]) <= self.held[window, seq] for window in self.shares) else 0

    def cut(self, seq: int, n: int) -> None:
        self.tokens[seq] = self.tokens[seq][:n]
        for window in self.shares:
            self.held[window, seq] = {position for position in self.held[window, seq] if position < n}

    # --- rules ---

    @rule(growth=st.dictionaries(st.integers(0, SEQUENCES - 1), st.integers(1, MAX_ROWS // 2), min_size=1, max_size=2))
    def step(self, growth: dict[int, int]) -> None:
        assume(all(len(self.tokens[seq]) + n <= CONTEXT for seq, n in growth.items()))
        self.grow(growth)

    @rule(seq=st.integers(0, SEQUENCES - 1), n=st.integers(MAX_ROWS, 500))
    def run_a_prompt(self, seq: int, n: int) -> None:
        for at in range(0, min(n, CONTEXT - len(self.tokens[seq])), MAX_ROWS):
            self.grow({seq: min(MAX_ROWS, n - at, CONTEXT - len(self.tokens[seq]))})

    @rule(seqs=st.sets(st.integers(0, SEQUENCES - 1), min_size=1), steps=st.integers(1, 12))
    def stop_a_batch_in_the_middle(self, seqs: set[int], steps: int) -> None:
        """Do what `forward` does when it is cancelled."""
        before = {seq: len(self.tokens[seq]) for seq in seqs}
        rows = MAX_ROWS // len(seqs)
        for _ in range(steps):
            if max(len(self.tokens[seq]) for seq in seqs) + rows <= CONTEXT:
                self.grow(dict.fromkeys(seqs, rows))
        for seq, length in before.items():
            grown = len(self.tokens[seq]) - length
            self.truncate(seq, length)
            assert grown > MAX_ROWS or len(self.tokens[seq]) == length  # cancelling a single step loses nothing

    @rule(seq=st.integers(0, SEQUENCES - 1), n=st.integers(0, CONTEXT))
    def truncate(self, seq: int, n: int) -> None:
        expected = self.kept(seq, n)
        assert self.cache.kv.truncate(seq, n) == expected
        self.cut(seq, expected)

    @rule(seq=st.integers(0, SEQUENCES - 1), back=st.integers(1, 2 * CUT_BACK))
    def take_some_back(self, seq: int, back: int) -> None:
        self.truncate(seq, max(0, len(self.tokens[seq]) - back))

    @rule(seq=st.integers(0, SEQUENCES - 1), number=st.integers(0, 2), beside=st.integers(-40, 40))
    def go_back_about_as_far_as_a_window_reaches(self, seq: int, number: int, beside: int) -> None:
        window = list(self.shares)[number % len(self.shares)]
        n = min(self.held[window, seq], default=0) + window - 1 + beside
        if 0 <= n < len(self.tokens[seq]):
            self.truncate(seq, n)

    @rule(src=st.integers(0, SEQUENCES - 1), dst=st.integers(0, SEQUENCES - 1), back=st.integers(0, 2 * CUT_BACK))
    def copy(self, src: int, dst: int, back: int) -> None:
        n = max(0, len(self.tokens[src]) - back)
        expected = self.kept(src, n)
        assert self.cache.kv.copy(src, dst, n) == expected
        self.tokens[dst] = self.tokens[src]
        for window in self.shares:
            self.held[window, dst] = set(self.held[window, src])
        self.cut(dst, expected)

    @rule(seq=st.integers(0, SEQUENCES - 1))
    def free(self, seq: int) -> None:
        self.cache.kv.free(seq)
        self.cut(seq, 0)

    @invariant()
    def lengths_agree(self) -> None:
        assert self.cache.kv.lengths == [len(tokens) for tokens in self.tokens]

    @invariant()
    def what_is_held_is_read(self) -> None:
        for (window, seq), held in self.held.items():
            if held:
                positions = range(min(held), max(held) + 1)
                assert len(positions) == len(held)
                assert self.cache.read(window, seq, positions) == self.tokens[seq][positions.start : positions.stop]

    @invariant()
    def nobody_has_more_than_a_share(self) -> None:
        for window, share in self.shares.items():
            assert all(len(self.cache.held_blocks(window, seq)) <= share for seq in range(SEQUENCES))

    @invariant()
    def blocks_are_counted(self) -> None:
        assert_blocks_counted(self.cache, SEQUENCES)


WindowMachine.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=25)
TestWindows = pytest.mark.push(WindowMachine.TestCase)


@pytest.mark.push
@pytest.mark.parametrize("window", [2, 4, 32, 33, 128, 500])
@pytest.mark.parametrize("length", [700, 703, 704, 705])
def test_an_answer_of_256_tokens_and_a_step_can_be_taken_back_wherever_it_ends(window: int, length: int) -> None:
    cache = cache_of(window)
    run(cache, 0, list(range(length)))
    first = blocks_of(length) - shares_of((window,))[window]
    for n in range(length, 0, -1):
        kept = cache.kv.copy(0, 1, n)
        reached = first <= 0 or n - window + 1 >= first * BLOCK
        assert kept == (n if reached else 0)
        assert reached or n < length - CUT_BACK - MAX_ROWS
        cache.kv.free(1)
    assert cache.kv.truncate(0, length - CUT_BACK - MAX_ROWS) == length - CUT_BACK - MAX_ROWS
    seen = range(max(0, cache.kv.lengths[0] - window + 1), cache.kv.lengths[0])
    assert cache.read(window, 0, seen) == list(seen)


def test_a_window_takes_what_its_share_is_and_no_more() -> None:
    cache = cache_of(0, 64)
    run(cache, 0, list(range(CONTEXT)))
    assert len(cache.held_blocks(0, 0)) == blocks_of(CONTEXT)
    assert len(cache.held_blocks(64, 0)) == blocks_of_sequence(64, CONTEXT, MAX_ROWS) < blocks_of(CONTEXT) // 2


def test_a_window_longer_than_the_context_keeps_everything() -> None:
    cache = cache_of(4 * CONTEXT)
    run(cache, 0, list(range(CONTEXT)))
    assert cache.kv.truncate(0, 1) == 1
    assert cache.read(4 * CONTEXT, 0, range(1)) == [0]


def test_a_prefix_that_is_shared_is_there_for_its_holder_when_the_others_window_moves_on() -> None:
    cache = cache_of(40)
    run(cache, 0, list(range(300)))
    assert cache.kv.copy(0, 1, 300) == 300
    run(cache, 0, list(range(1000, 1600)))
    assert cache.kv.truncate(0, 300) == 0
    assert cache.read(40, 1, range(261, 300)) == list(range(261, 300))
    run(cache, 1, [7])
    assert cache.read(40, 1, range(262, 301)) == [*range(262, 300), 7]


def test_windows_bound_no_capacity() -> None:
    assert cache_of(40).kv.capacity == SEQUENCES * blocks_of(CONTEXT) * BLOCK
    assert cache_of(40, 0).kv.capacity == SEQUENCES * blocks_of(CONTEXT) * BLOCK
    assert PagedCache({0: 7, 40: 60}, SEQUENCES, CONTEXT).kv.capacity == 7 * BLOCK


def test_windows_do_not_move_when_the_rest_is_full() -> None:
    """A batch is allocated fully or not at all, even if it takes several steps."""
    cache = PagedCache({0: 20, 40: 2 * 12}, 2, CONTEXT)
    run(cache, 0, list(range(600)))
    before = cache.held_blocks(40, 0)
    for grow in (cache.kv.require, cache.kv.extend):
        with pytest.raises(KVFull, match="3 more blocks of 32 tokens needed, 1 of 20 free"):
            grow({0: 41, 1: 1})
    assert cache.held_blocks(40, 0) == before
    assert cache.kv.lengths == [600, 0]


def test_more_rows_than_blocks_are_for_are_refused() -> None:
    """Otherwise the first rows would read what the last ones wrote."""
    cache = cache_of(40)
    run(cache, 0, list(range(600)))
    with pytest.raises(AssertionError, match="the step has more rows"):
        cache.kv.extend({0: MAX_ROWS + CUT_BACK + 2 * BLOCK})
