"""Tests of the choice of an upstream."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.serving.upstreams.pool import SentPrefixes, chosen_upstream, prefix_hashes

MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(("user", "assistant")), "content": st.text(max_size=300)}),
    min_size=1,
    max_size=6,
)
LOADS = st.dictionaries(st.integers(0, 9), st.tuples(st.integers(0, 50), st.integers(0, 1000)), min_size=1, max_size=6)


def asked(messages: list[Any], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": messages, **fields}


@pytest.mark.push
@given(MESSAGES, MESSAGES)
def test_longer_conversations_begin_with_the_same_hashes(before: list[Any], after: list[Any]) -> None:
    first, longer = prefix_hashes(asked(before)), prefix_hashes(asked(before + after))
    assert longer[: len(first)] == first


@given(MESSAGES, st.floats(0, 2), st.booleans())
def test_only_the_prompt_counts(messages: list[Any], temperature: float, stream: bool) -> None:
    assert prefix_hashes(asked(messages)) == prefix_hashes(asked(messages, temperature=temperature, stream=stream))


def test_models_and_tools_begin_the_prompt() -> None:
    messages = [{"role": "user", "content": "x" * 1000}]
    plain = prefix_hashes(asked(messages))
    assert not set(plain) & set(prefix_hashes(asked(messages, model="other")))
    assert not set(plain) & set(prefix_hashes(asked(messages, tools=[{"type": "function"}])))


def test_hashes_cover_80_percent_of_a_common_prefix() -> None:
    texts = ["a" * 100_000 + letter for letter in "bc"]
    one, other = (prefix_hashes({"prompt": text}) for text in texts)
    assert one == other
    assert len(one) < 40
    half = prefix_hashes({"prompt": "a" * 50_000})
    assert one[: len(half)] == half
    assert len(half) + 4 >= len(one)  # 1.25^4 > 2


def test_huge_bodies_take_little_time() -> None:
    started = time.process_time()
    assert len(prefix_hashes({"prompt": "x" * (16 << 20)})) < 50
    assert time.process_time() - started < 2.0


@given(LOADS, st.data())
def test_the_choice_is_never_clearly_busier_than_the_idlest(loads: dict[int, tuple[int, int]], data: Any) -> None:
    preferred = data.draw(st.none() | st.sampled_from(sorted(loads)))
    least = min(load for load, _ in loads.values())
    found = chosen_upstream(loads, preferred)
    assert loads[found][0] <= 1.5 * least + 4
    if preferred is not None and loads[preferred][0] <= 1.5 * least + 4:
        assert found == preferred
    else:
        assert loads[found][0] == least


def test_equally_busy_upstreams_take_turns() -> None:
    counts, order = {0: 0, 1: 0, 2: 0}, []
    for _ in range(6):
        number = chosen_upstream({one: (0, count) for one, count in counts.items()}, None)
        counts[number] += 1
        order.append(number)
    assert order == [0, 1, 2, 0, 1, 2]


def test_the_longest_prefix_wins() -> None:
    sent, hashes = SentPrefixes(), [b"a", b"ab", b"abc"]
    sent.remember("", hashes[:2], 0)
    sent.remember("", hashes[:1], 1)
    assert sent.longest("", hashes, {0, 1}) == 0
    assert sent.longest("", hashes[:1], {0, 1}) == 1
    assert sent.longest("", hashes, {1}) == 1, "the longest prefix among those that are up"
    assert sent.longest("", [b"x"], {0, 1}) is None


@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.binary(max_size=2), max_size=4), st.integers(0, 2))))
def test_tenants_do_not_see_each_other(sent: list[tuple[str, list[bytes], int]]) -> None:
    both, alone = SentPrefixes(most=5), SentPrefixes(most=5)
    for tenant, hashes, upstream in sent:
        both.remember(tenant, hashes, upstream)
        if tenant == "a":
            alone.remember(tenant, hashes, upstream)
    for _, hashes, _ in sent:
        assert both.longest("a", hashes, {0, 1, 2}) == alone.longest("a", hashes, {0, 1, 2})


@given(st.lists(st.lists(st.binary(max_size=2), max_size=8)))
def test_memory_is_bounded(sent: list[list[bytes]]) -> None:
    prefixes = SentPrefixes(most=6)
    for hashes in sent:
        prefixes.remember("", hashes, 0)
    assert len(prefixes._tables.get("", ())) <= 6


def test_old_prefixes_are_forgotten_first() -> None:
    sent = SentPrefixes(most=2)
    sent.remember("", [b"a"], 0)
    sent.remember("", [b"b"], 1)
    sent.remember("", [b"a"], 0)
    sent.remember("", [b"c"], 2)
    assert [sent.longest("", [one], {0, 1, 2}) for one in (b"a", b"b", b"c")] == [0, None, 2]
