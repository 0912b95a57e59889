"""Tracks which tokens each sequence of the KV cache holds, so that prompts can reuse a cached prefix.

A radix tree finds the sequence with the longest common prefix, for many sequences at once. The tree is independent of
the KV cache and the queue: it knows only tokens and their owners.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from llmrun.base.errors import KVFull

if TYPE_CHECKING:
    from llmrun.backends.base import KVCache
    from llmrun.engine.saved_state.budget import SavedPrefixes

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


# A saved prefix is not loaded for fewer tokens than a block has.
_LEAST_LOADED: Final = 32
# Shorter prefixes are not worth a file.
_LEAST_SAVED: Final = 64


@dataclass(slots=True, eq=False)
class Slot:
    """One sequence of the KV cache.

    `tokens` are the tokens in the cache; tokens with adapters have other numbers (engine/adapters.py). An idle slot
    keeps its tokens for a later request of the same tenant with the same prefix. The first `n_listed` of them are in
    the tree of prefixes.
    """

    index: int
    tenant: str = ""
    tokens: list[int] = field(default_factory=list)
    n_listed: int = 0
    busy: bool = False
    is_copy: bool = False  # True if its tokens were copied from another slot when it was acquired
    released: int = 0  # the value of the release counter when the slot was last released
    n_saved: int = 0  # number of tokens when they were last saved


class SequenceSlots:
    """The contents of a backend's KV cache.

    Every token listed here is in the cache, but the cache may contain further tokens.

    saved  prefixes in files, which are loaded if they are longer than the cached ones; None if there are none
    """

    def __init__(self, kv: KVCache, count: int) -> None:
        self.saved: SavedPrefixes | None = None
        self._kv = kv
        self._slots = [Slot(index) for index in range(count)]
        self._releases = 0
        self._prefixes: PrefixTree[Slot] = PrefixTree()
        self._idle_blocks: int | None = None  # None if it must be computed again

    @property
    def n_idle(self) -> int:
        """The number of slots that `acquire` can still return."""
        return sum(not slot.busy for slot in self._slots)

    @property
    def idle_blocks(self) -> int:
        """The number of blocks that only idle slots hold."""
        if self._idle_blocks is None:
            self._idle_blocks = self._kv.held([slot.index for slot in self._slots if not slot.busy and slot.tokens])
        return self._idle_blocks

    def cached(self, tokens: list[int], tenant: str) -> int:
        """Return the length of the tenant's longest prefix of `tokens` that is cached or saved."""
        shared = self._longest(tokens, tenant)[0]
        return max(shared, self.saved.longest(tokens, tenant)) if self.saved is not None else shared

    def acquire(self, tokens: list[int], tenant: str = "") -> Slot:
        """Take an idle slot and give it the tenant's longest prefix of `tokens` that is cached or saved.

        At least one slot must be idle.

        The prefix never includes the last token, because only running that token yields its logits.
        """
        self._idle_blocks = None
        idle = sorted((slot for slot in self._slots if not slot.busy), key=lambda slot: slot.released)
        shared, source = self._longest(tokens, tenant)
        if self.saved is not None and self.saved.longest(tokens[:-1], tenant) >= shared + _LEAST_LOADED:
            self._load(idle[0], tokens[:-1], tenant)
            shared, source = self._longest(tokens, tenant)
        n = min(shared, len(tokens) - 1)
        slot = idle[0] if source is None else _choose_slot(source, shared, idle)
        self._unlist(slot)  # it stays empty if the next line raises, because the cache's contents are unknown then
        slot.tokens = []
        slot.n_saved = 0
        slot.is_copy = source is not None and source is not slot
        if source is None or source is slot:
            kept = self._kv.truncate(slot.index, n)
        else:
            kept = self._kv.copy(source.index, slot.index, n)
        slot.tokens = tokens[:kept]
        slot.tenant = tenant
        slot.busy = True
        return slot

    def _load(self, slot: Slot, tokens: list[int], tenant: str) -> None:
        """Replace the contents of an idle slot with the tenant's longest saved prefix of `tokens`."""
        assert self.saved is not None
        self.forget(slot)
        kept = None
        while kept is None:
            try:
                kept = self.saved.load(self._kv, slot.index, tokens, tenant)
            except KVFull:
                kept = None if self.forget_oldest_idle() else 0  # 0 if running requests need the cache
        slot.tokens, slot.tenant, slot.n_saved = tokens[:kept], tenant, kept
        self._list(slot)

    def save(self, most: int | None = None) -> bool:
        """Save the tokens of the most recently released slot that is idle and has unsaved tokens.

        most  number of tokens to save, or None for all
        Returns whether there may be more to save.
        """
        unsaved = [
            slot
            for slot in self._slots
            if not slot.busy and len(slot.tokens) >= _LEAST_SAVED and slot.n_saved != len(slot.tokens)
        ]
        if self.saved is None or not unsaved:
            return False
        slot = max(unsaved, key=lambda slot: slot.released)
        n = len(slot.tokens) if most is None else min(most, len(slot.tokens))
        if self.saved.save(self._kv, slot.index, slot.tokens, n, slot.tenant):
            return True
        slot.n_saved = len(slot.tokens)
        return len(unsaved) > 1

    def release(self, slot: Slot) -> None:
        """Mark the slot as idle. It keeps its tokens."""
        self._idle_blocks = None
        self._list(slot)
        self._releases += 1
        slot.busy = False
        slot.released = self._releases

    def give_back(self, slot: Slot) -> None:
        """Undo `acquire` as far as possible. A copy is freed, because its source would have to copy shared blocks."""
        if slot.is_copy:
            self.forget(slot)
        else:
            self.release(slot)

    def truncate(self, slot: Slot, n: int) -> int:
        """Shorten a slot to its first n tokens. Returns how many tokens the cache kept."""
        held, slot.tokens = slot.tokens, []  # stays empty if the next line raises
        if n < slot.n_listed:
            self._unlist(slot)
        kept = self._kv.truncate(slot.index, n)
        if kept < slot.n_listed:
            self._unlist(slot)
        slot.tokens = held[:kept]
        return kept

    def recount(self, slots: Iterable[Slot]) -> None:
        """After a cancelled pass, truncate the slots to the tokens that the cache still holds.

        A recurrent state that the pass had started to change is lost.
        """
        for slot in slots:
            self.truncate(slot, len(slot.tokens))

    def forget(self, slot: Slot) -> None:
        """Empty the slot and release it."""
        self._unlist(slot)
        self._idle_blocks = None
        slot.tokens = []
        slot.busy = False
        slot.released = 0
        self._kv.free(slot.index)

    def forget_oldest_idle(self, spared: Collection[Slot] = ()) -> bool:
        """Empty the idle slot that was released first. Returns False if no idle slot holds any tokens.

        spared  slots to leave alone
        """
        holding = [slot for slot in self._slots if not slot.busy and slot.tokens and slot not in spared]
        if not holding:
            return False
        self.forget(min(holding, key=lambda slot: slot.released))
        return True

    def lend(self, spared: Collection[Slot]) -> Slot | None:
        """Empty the idle slot that was released first, and return it, or None if there is none.

        It stays idle, so the caller must call `keep` or `forget` before the next `acquire`.

        spared  slots to leave alone
        """
        idle = [slot for slot in self._slots if not slot.busy and slot not in spared]
        if not idle:
            return None
        slot = min(idle, key=lambda slot: slot.released)
        self.forget(slot)
        return slot

    def keep(self, slot: Slot, tokens: list[int]) -> list[int]:
        """Note the tokens of a slot from `lend`, and return the list that it has until the slot gets other tokens.

        The slot is the last one of the idle ones that is emptied. No request finds the tokens, and they are not saved.
        """
        self._idle_blocks = None
        self._releases += 1
        slot.tokens, slot.n_saved, slot.released = tokens, len(tokens), self._releases
        return tokens

    def _longest(self, tokens: list[int], tenant: str) -> tuple[int, Slot | None]:
        """Return the length of the tenant's longest cached prefix of `tokens`, and a slot that has it."""
        for slot in self._slots:
            if slot.busy:
                self._list(slot)
        match = self._prefixes.longest(tenant, tokens)
        return (match.n, match.owner) if match is not None else (0, None)

    def _list(self, slot: Slot) -> None:
        """Add all tokens of a slot to the tree. Busy slots are not kept up to date, because drafts come and go."""
        if slot.n_listed == len(slot.tokens):
            return
        if slot.n_listed:
            self._prefixes.extend(slot, slot.tokens[slot.n_listed :])
        else:
            self._prefixes.insert(slot.tenant, slot.tokens, slot)
        slot.n_listed = len(slot.tokens)

    def _unlist(self, slot: Slot) -> None:
        self._prefixes.remove(slot)
        slot.n_listed = 0


def _choose_slot(source: Slot, shared: int, idle: list[Slot]) -> Slot:
    """Return the slot for a request that shares its first `shared` tokens with `source`.

    If `source` is idle, it is given to a request that reuses at least half of its tokens, such as the next turn of a
    conversation. It is also given to a request that shares no tokens, because it is then the oldest idle slot. Any
    other request is given the oldest of the other idle slots, if there are any, to preserve the tokens in `source`.
    """
    others = [slot for slot in idle if slot is not source]
    if source.busy or (others and 0 < shared < len(source.tokens) / 2):
        return others[0]
    return source
