"""Tests of the prefix tree, against a model that compares every pair of sequences."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from llmrun.engine.slots import Match, PrefixTree, _Node
from tests.support.tiers import examples

TENANTS = st.sampled_from(["red", "blue"])
OWNERS = st.integers(0, 7)
# Few tokens and long common runs, so that sequences often branch, end inside each other, and are equal.
TOKENS = st.lists(st.sampled_from([[0], [1], [2], [0] * 5, [0, 1] * 3]), max_size=5).map(
    lambda runs: [token for run in runs for token in run]
)


def common(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


class Model(RuleBasedStateMachine):
    """Random operations on a tree and on a plain dictionary, whose order is that of the insertions."""

    @initialize()
    def start(self) -> None:
        self.tree: PrefixTree[int] = PrefixTree()
        self.model: dict[int, tuple[str, list[int]]] = {}

    @rule(tenant=TENANTS, tokens=TOKENS, owner=OWNERS)
    def insert(self, tenant: str, tokens: list[int], owner: int) -> None:
        given_tokens = list(tokens)
        self.tree.insert(tenant, given_tokens, owner)
        given_tokens[:] = [9] * len(given_tokens)  # the caller may change its list
        self.model.pop(owner, None)
        self.model[owner] = tenant, tokens

    @rule(owner=OWNERS, tokens=TOKENS)
    def extend(self, owner: int, tokens: list[int]) -> None:
        if owner in self.model:
            self.tree.extend(owner, tokens)
            tenant, before = self.model[owner]
            self.model[owner] = tenant, before + tokens

    @rule(source=OWNERS, owner=OWNERS)
    def copy(self, source: int, owner: int) -> None:
        if source in self.model and source != owner:
            self.insert(*self.model[source], owner)

    @rule(owner=OWNERS)
    def remove(self, owner: int) -> None:
        self.tree.remove(owner)
        self.model.pop(owner, None)

    @rule(tenant=TENANTS, tokens=TOKENS)
    def query(self, tenant: str, tokens: list[int]) -> None:
        lengths = {owner: common(tokens, held) for owner, (whose, held) in self.model.items() if whose == tenant}
        n = max(lengths.values(), default=0)
        newest = [owner for owner, length in lengths.items() if length == n][-1:]
        assert self.tree.longest(tenant, tokens) == (Match(n, newest[0]) if n else None)

    @rule()
    def clear(self) -> None:
        self.tree.clear()
        self.model.clear()

    @invariant()
    def the_tree_is_as_small_as_possible(self) -> None:
        assert len(self.tree) == len(self.model)
        assert all(owner in self.tree for owner in self.model)
        assert set(self.tree._roots) == {tenant for tenant, _ in self.model.values()}
        for tenant, root in self.tree._roots.items():
            assert root.parent is None
            assert root.tokens == []
            found = dict(sequences(root, []))
            assert found == {owner: tokens for owner, (whose, tokens) in self.model.items() if whose == tenant}


def sequences(node: _Node[int], before: list[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield the owners in and below a node with their sequences, and check the nodes."""
    tokens = before + node.tokens
    inserted = list(node.owners.values())
    for owner in node.owners:
        yield owner, tokens
    for first, child in node.children.items():
        assert child.parent is node
        assert child.tokens[0] == first
        assert child.owners or len(child.children) > 1
        assert child.newest is not None
        inserted.append(child.newest[0])
        yield from sequences(child, tokens)
    assert node.newest is not None
    assert node.newest[0] == max(inserted)


Model.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestAgainstModel = pytest.mark.push(Model.TestCase)


def test_nothing_matches_in_an_empty_tree() -> None:
    assert PrefixTree[str]().longest("red", [1, 2, 3]) is None


def test_tenants_never_see_each_other() -> None:
    tree: PrefixTree[str] = PrefixTree()
    tree.insert("red", [1, 2, 3], "slot")
    assert tree.longest("blue", [1, 2, 3]) is None
    assert tree.longest("red", [1, 2, 3]) == Match(3, "slot")


def test_among_equal_prefixes_the_newest_owner_is_returned() -> None:
    tree: PrefixTree[str] = PrefixTree()
    tree.insert("red", [1, 2, 3], "first")
    tree.insert("red", [1, 2, 4], "second")
    assert tree.longest("red", [1, 2, 5]) == Match(2, "second")
    tree.insert("red", [1, 2, 3], "first")
    assert tree.longest("red", [1, 2, 5]) == Match(2, "first")


def test_equal_sequences_that_grow_equally_share_all_tokens() -> None:
    tree: PrefixTree[str] = PrefixTree()
    for owner in ("one", "other"):
        tree.insert("red", [1, 2], owner)
    for owner in ("one", "other"):
        tree.extend(owner, [3, 4])
    (node,) = tree._roots["red"].children.values()
    assert (node.tokens, set(node.owners)) == ([1, 2, 3, 4], {"one", "other"})


@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.data())
def test_growing_equals_inserting_at_once(tokens: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(tokens)))
    tree: PrefixTree[str] = PrefixTree()
    tree.insert("red", tokens[:cut], "grown")
    for token in tokens[cut:]:
        tree.extend("grown", [token])
    assert tree.longest("red", [*tokens, 9]) == Match(len(tokens), "grown")


@pytest.mark.push
def test_shared_prefixes_are_stored_once() -> None:
    """2,000 owners of 8,000 tokens would hold 16 million tokens without sharing."""
    tree: PrefixTree[int] = PrefixTree()
    prompt = [token % 5000 for token in range(8000)]
    for owner in range(2000):
        tree.insert("red", [*prompt, owner, owner], owner)
    assert stored(tree._roots["red"]) == 8000 + 2 * 2000
    for owner in range(2000):
        tree.remove(owner)
    assert not tree._roots


def stored(node: _Node[int]) -> int:
    return len(node.tokens) + sum(stored(child) for child in node.children.values())
