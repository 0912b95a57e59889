"""Finds the cached sequence with the longest common prefix, for many sequences at once.

The tree is independent of the KV cache and the queue: it knows only tokens and their owners. One tree can hold the
contents of the cache, and another one the prompts that are being computed.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)

_CHUNK = 256  # tokens per comparison


@dataclass(frozen=True, slots=True)
class Match(Generic[Owner]):
    """A prefix that is in the tree: its length in tokens, and an owner whose sequence begins with it."""

    n: int
    owner: Owner


@dataclass(slots=True, eq=False)
class _Node(Generic[Owner]):
    """A run of tokens that some sequences have in common, and the sequences that end or continue after it.

    tokens    the run; empty only in the root of a tenant
    parent    None in the root of a tenant
    children  the continuations, by their first token
    owners    the owners whose sequences end here, and when each of them was inserted
    newest    when the newest owner in this node and below was inserted, and that owner
    """

    tokens: list[int]
    parent: _Node[Owner] | None
    children: dict[int, _Node[Owner]] = field(default_factory=dict)
    owners: dict[Owner, int] = field(default_factory=dict)
    newest: tuple[int, Owner] | None = None


class PrefixTree(Generic[Owner]):
    """A radix tree over the token sequences of owners, such as the slots of the KV cache.

    Each owner has one sequence. Each tenant has a tree of its own, so that no call can tell one tenant what another one
    has sent. A prefix that several sequences share is stored once.

    Not thread-safe. With sequences of 128k tokens, `longest` takes 1 to 3 ms, and `insert` and `remove` up to 5 ms;
    `extend` takes a microsecond at any length. 5,000 owners that branch off one such sequence need 10 MB.
    """

    def __init__(self) -> None:
        self._roots: dict[str, _Node[Owner]] = {}  # by tenant; only tenants that have sequences
        self._places: dict[Owner, tuple[str, _Node[Owner]]] = {}  # each owner's tenant and last node
        self._insertions = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._places

    def insert(self, tenant: str, tokens: list[int], owner: Owner) -> None:
        """Give an owner a sequence, which replaces the one that it had. The tokens are copied."""
        self.remove(owner)
        self._insertions += 1
        root = self._roots.setdefault(tenant, _Node([], None))
        self._place(tenant, root, tokens, owner, self._insertions)

    def extend(self, owner: Owner, tokens: list[int]) -> None:
        """Append tokens to the sequence of an owner, which keeps its age. Raises KeyError for unknown owners."""
        tenant, node = self._places[owner]
        if node.parent is not None and not node.children and len(node.owners) == 1:
            node.tokens += tokens
        elif tokens:
            self._place(tenant, node, tokens, owner, node.owners.pop(owner))
            self._tidy(tenant, node)

    def remove(self, owner: Owner) -> None:
        """Remove an owner and its sequence. Unknown owners are ignored."""
        if owner not in self._places:
            return
        tenant, node = self._places.pop(owner)
        inserted = node.owners.pop(owner)
        above: _Node[Owner] | None = node
        while above is not None and above.newest == (inserted, owner):
            above.newest = _newest(above)
            above = above.parent
        self._tidy(tenant, node)

    def longest(self, tenant: str, tokens: list[int]) -> Match[Owner] | None:
        """Return the longest prefix of `tokens` with which a sequence of the tenant begins, or None if there is none.

        The owner is the newest of those whose sequences begin with it.
        """
        node = self._roots.get(tenant)
        n = shared = 0
        while node is not None and shared == len(node.tokens) and n < len(tokens) and tokens[n] in node.children:
            node = node.children[tokens[n]]
            shared = _shared(node, tokens, n)
            n += shared
        return Match(n, node.newest[1]) if n and node is not None and node.newest is not None else None

    def clear(self) -> None:
        """Remove all owners."""
        self._roots.clear()
        self._places.clear()

    def _place(self, tenant: str, node: _Node[Owner], tokens: list[int], owner: Owner, inserted: int) -> None:
        """Add an owner whose sequence is that of `node`, followed by `tokens`."""
        n = 0
        while n < len(tokens):
            child = node.children.get(tokens[n])
            if child is None:
                child = node.children[tokens[n]] = _Node(tokens[n:], node)
            shared = _shared(child, tokens, n)
            node = child if shared == len(child.tokens) else _split(child, shared)
            n += shared
        node.owners[owner] = inserted
        self._places[owner] = tenant, node
        above: _Node[Owner] | None = node
        while above is not None and (above.newest is None or above.newest[0] < inserted):
            above.newest = inserted, owner
            above = above.parent

    def _tidy(self, tenant: str, node: _Node[Owner]) -> None:
        """Remove a node if no sequence ends there any more and at most one continues."""
        if node.owners or len(node.children) > 1:
            return
        if node.parent is None:
            if not node.children:
                del self._roots[tenant]
        elif node.children:
            _merge(node)
        else:
            del node.parent.children[node.tokens[0]]
            self._tidy(tenant, node.parent)


def _shared(node: _Node[Owner], tokens: list[int], start: int) -> int:
    """Return how many tokens of a node agree with `tokens[start:]`."""
    return common_prefix(node.tokens, tokens[start : start + len(node.tokens)])


def _split(node: _Node[Owner], n: int) -> _Node[Owner]:
    """Give the first n tokens of a node to a new parent, and return the parent."""
    assert node.parent is not None
    above = _Node(node.tokens[:n], node.parent, {node.tokens[n]: node}, newest=node.newest)
    node.parent.children[node.tokens[0]] = above
    node.tokens = node.tokens[n:]
    node.parent = above
    return above


def _merge(node: _Node[Owner]) -> None:
    """Replace a node by its only child, which takes over its tokens."""
    assert node.parent is not None
    (child,) = node.children.values()
    child.tokens = node.tokens + child.tokens
    child.parent = node.parent
    node.parent.children[node.tokens[0]] = child


def _newest(node: _Node[Owner]) -> tuple[int, Owner] | None:
    below = [child.newest for child in node.children.values() if child.newest is not None]
    here = [(inserted, owner) for owner, inserted in node.owners.items()]
    return max([*below, *here], key=lambda each: each[0], default=None)


def common_prefix(a: list[int], b: list[int]) -> int:
    """Return the length of the longest common prefix.

    Comparing slices before single tokens takes 1.4 ms for 128k tokens; a loop over all tokens takes 4.3 ms.
    """
    end = min(len(a), len(b))
    start = 0
    while start < end and a[start : start + _CHUNK] == b[start : start + _CHUNK]:
        start += _CHUNK
    return next((index for index in range(start, end) if a[index] != b[index]), end)
