"""Tests of the count of computed prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.jobs.batching.estimate.counting import PrefixCounter, common_prefix

PROMPTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=20)


def counted(prompts: Sequence[Sequence[int]]) -> PrefixCounter:
    counter = PrefixCounter()
    for prompt in prompts:
        counter.add(prompt)
    return counter


def trie_nodes(prompts: Sequence[Sequence[int]]) -> int:
    return len({tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)})


@pytest.mark.push
@given(PROMPTS)
def test_sorted_prompts_compute_the_nodes_of_a_trie(prompts: list[list[int]]) -> None:
    """A prompt that equals another one still computes its last token."""
    repeated = len(prompts) - len(set(map(tuple, prompts)))
    counter = counted(sorted(prompts))
    assert counter.computed == trie_nodes(prompts) + repeated
    assert counter.total == sum(map(len, prompts))


@pytest.mark.push
@given(PROMPTS)
def test_no_order_computes_less_than_the_trie(prompts: list[list[int]]) -> None:
    counter = counted(prompts)
    assert trie_nodes(prompts) <= counter.computed <= counter.total


@pytest.mark.push
@given(PROMPTS)
def test_common_tokens_begin_every_prompt(prompts: list[list[int]]) -> None:
    common = counted(prompts).common
    assert len({tuple(prompt[:common]) for prompt in prompts}) == 1
    assert len({tuple(prompt[: common + 1]) for prompt in prompts}) > 1 or common == min(map(len, prompts))


def test_common_prefixes() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([], [1]) == 0
