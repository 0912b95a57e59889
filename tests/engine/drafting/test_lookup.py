"""Tests of lookup: the index against a brute-force twin, and the memory of earlier answers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.engine.drafting import lookup
from llmrun.engine.drafting.base import Draft, Kind
from llmrun.engine.drafting.lookup import LookupSource, SuffixIndex
from llmrun.engine.requests import Request, TokenPrompt

FEW_TOKENS = st.lists(st.integers(0, 2), max_size=80)


def always(kinds: Sequence[Kind]) -> bool:
    return True


def draft(source: LookupSource, tokens: Sequence[int], most: int = 15) -> Draft:
    return source.drafter(Request(TokenPrompt(tokens))).draft(tokens, most, always)


def longest_match(tokens: Sequence[int], tail: Sequence[int], candidates: int) -> tuple[int, int]:
    """Return the same as SuffixIndex.find, by comparing the tail with all positions."""
    ends = [at for at in range(2, len(tokens)) if list(tokens[at - 2 : at]) == list(tail[-2:]) and len(tail) >= 2]
    best_at, best = 0, 0
    for at in ends[::-1][:candidates]:
        lengths = [n for n in range(2, min(32, at, len(tail)) + 1) if list(tokens[at - n : at]) == list(tail[-n:])]
        if max(lengths) > best:
            best_at, best = at, max(lengths)
    return best_at, best


@pytest.mark.push
@given(FEW_TOKENS, FEW_TOKENS, st.lists(st.integers(1, 80), max_size=5))
def test_the_longest_match_is_found(tokens: list[int], tail: list[int], cuts: list[int]) -> None:
    """The result does not depend on how many parts the sequence was added in."""
    index = SuffixIndex()
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(tokens)], strict=True):
        index.append(tokens[begin:end])
    assert index.tokens == tokens
    assert index.find(tail) == longest_match(tokens, tail, candidates=16)


@pytest.mark.push
@given(FEW_TOKENS)
def test_a_draft_continues_the_longest_match(tokens: list[int]) -> None:
    at, length = longest_match(tokens, tokens[-32:], candidates=16)
    found = draft(LookupSource(), tokens).tokens
    assert len(found) == (15 if length else 0)
    if length:
        expected = tokens[at : at + 15]
        assert list(found[: len(expected)]) == expected


def test_the_kinds_grow_with_the_match() -> None:
    found = draft(LookupSource(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3], most=6)
    assert found.tokens == (4, 5, 6, 7, 8, 9)
    assert found.kinds == (("lookup", 3), *[("lookup", 4)] * 2, *[("lookup", 6)] * 2, ("lookup", 8))


def test_a_repetition_is_continued_beyond_the_end() -> None:
    assert draft(LookupSource(), [7, 8, 9, 7, 8, 9, 7, 8], most=7).tokens == (9, 7, 8, 9, 7, 8, 9)


def test_earlier_answers_are_found_by_other_requests() -> None:
    source = LookupSource()
    source.learn([10, 11, 12, 13, 14])
    assert draft(source, [1, 2, 11, 12]).tokens == (13, 14)


def test_the_longer_match_wins() -> None:
    source = LookupSource()
    source.learn([10, 11, 12, 99])
    assert draft(source, [11, 12, 50, 10, 11, 12], most=1).tokens == (99,)
    assert draft(source, [10, 11, 12, 50, 10, 11, 12], most=1).tokens == (50,)


def test_drafts_never_cross_two_answers() -> None:
    source = LookupSource()
    source.learn([10, 11, 12])
    source.learn([20, 21, 22])
    assert draft(source, [10, 11], most=5).tokens == (12,)
    assert min(draft(source, [11, 12], most=5).tokens, default=0) >= 0


def test_forgotten_answers_are_not_found() -> None:
    source = LookupSource()
    source.learn([10, 11, 12])
    source.forget()
    assert draft(source, [10, 11]).tokens == ()


def test_the_oldest_answers_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_REMEMBERED", 50)
    source = LookupSource()
    for answer in range(20):
        source.learn(range(1000 * answer, 1000 * answer + 9))
    assert len(source.remembered.tokens) <= 100
    assert draft(source, [19000, 19001], most=1).tokens == (19002,)
    assert draft(source, [0, 1], most=1).tokens == ()


def test_every_kind_has_an_expected_rate() -> None:
    source = LookupSource()
    found = draft(source, [*range(60), *range(30)])
    assert set(found.kinds) <= set(source.expected)
    assert all(0 < rate < 1 for rate in source.expected.values())
