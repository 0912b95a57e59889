"""Tracks which tokens each sequence of the KV cache holds, so that prompts can reuse a cached prefix."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

from llmrun.base.errors import KVFull
from llmrun.engine.costs import MOST_ROWS

if TYPE_CHECKING:
    from llmrun.backends.base import KVCache
    from llmrun.engine.saved_state.budget import SavedPrefixes

_CHUNK = 256  # tokens per comparison


def common_prefix(a: list[int], b: list[int]) -> int:
    """Return the length of the longest common prefix.

    Comparing slices first and then single tokens takes 1.4 ms for 128k tokens; a loop over all tokens takes 4.3 ms.
    """
    end = min(len(a), len(b))
    start = 0
    while start < end and a[start : start + _CHUNK] == b[start : start + _CHUNK]:
        start += _CHUNK
    return next((index for index in range(start, end) if a[index] != b[index]), end)


def whole_images(numbers: Sequence[int], n: int) -> int:
    """Return the length of the longest prefix of at most n tokens that does not end inside an image.

    Rows of images have negative numbers, of which all but the first one's are odd (image_rows.py).
    """
    while 0 < n < len(numbers) and numbers[n] < 0 and numbers[n] & 1:
        n -= 1
    return n


class Neighbours:
    """An Embedder's view of the requests on its backend. This class represents a backend without requests."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv

    def rows_beside_answers(self) -> int:
        """Return how many rows of texts may run before the next step, so that answers in progress hardly wait."""
        return MOST_ROWS

    def spare_blocks(self) -> int:
        """Return how many blocks of the cache remain free even if all requests grow to their limits."""
        return self._kv.capacity // self._kv.block_size

    def hold_up(self, held: bool) -> None:
        """Start or stop holding back new requests, to leave room for texts once the running requests have ended."""


# A saved prefix is loaded only if it is longer than the cached prefix by at least the tokens of a block.
_LEAST_LOADED: Final = 32
_LOADED_TOKEN_S: Final = 3e-5  # the assumed seconds to load a saved token, until a prefix has been loaded
_LEAST_TIMED: Final = 512  # tokens; opening the files dominates the time of shorter loads
# Shorter prefixes are not worth saving in a file.
_LEAST_SAVED: Final = 64
_MOST_DROPS: Final = 256


class Slot(Struct, eq=False):
    """One sequence of the KV cache.

    `tokens` are the tokens in the cache; tokens with adapters (adapters.py) and the rows of images (image_rows.py) have
    other numbers. An idle slot keeps its tokens for a later request of the same tenant with the same prefix.
    """

    index: int
    tenant: str = ""
    tokens: list[int] = field(default_factory=list)
    busy: bool = False
    is_copy: bool = False  # True if `acquire` copied the slot's tokens from another slot
    released: int = 0  # the value of the release counter when the slot was last released
    saved: SavedPrefixes | None = None  # the files in which the slot's tokens may be saved
    n_saved: int = 0  # number of tokens when the slot was last saved
    is_lent: bool = False  # True if the slot holds tokens of a text to embed, which no request may reuse
    owner: int | None = None  # the id of the last request that was admitted to the slot
    found: int = 0  # tokens that `acquire` found in the cache; the cache may have kept fewer of them


class SequenceSlots:
    """The contents of a backend's KV cache.

    Every token listed here is in the cache, but the cache may contain further tokens.

    In the methods, `saved` are prefixes in files, which are loaded if they are longer than the cached ones.
    """

    def __init__(self, kv: KVCache, count: int) -> None:
        self._kv = kv
        self._slots = [Slot(index) for index in range(count)]
        self._releases = 0
        self._idle_blocks: int | None = None  # None if the number must be computed again
        self._loaded_token_s = _LOADED_TOKEN_S
        self.drops: dict[int, float] = {}  # when the last requests lost tokens, by id, in seconds of `time.monotonic`

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

    def cached(self, tokens: list[int], tenant: str, saved: SavedPrefixes | None = None) -> int:
        """Return the length of the tenant's longest prefix of `tokens` that is cached or saved."""
        shared = self._longest(tokens, tenant)[0]
        return shared if saved is None else max(shared, saved.longest(tokens, tenant))

    def expected(self, tokens: list[int], tenant: str, saved: SavedPrefixes | None) -> tuple[int, float]:
        """Return the length of the prefix that `acquire` would find now, and the seconds to load it. Thread-safe."""
        shared = self._longest(tokens, tenant)[0]
        if stored := _loadable(tokens, tenant, saved, shared):
            return stored, stored * self._loaded_token_s
        return whole_images(tokens, min(shared, len(tokens) - 1)), 0.0

    def acquire(self, tokens: list[int], tenant: str = "", saved: SavedPrefixes | None = None) -> Slot:
        """Take an idle slot and fill it with the tenant's longest prefix of `tokens` that is cached or saved.

        At least one slot must be idle. The prefix never includes the last token, whose logits require running it.
        """
        self._idle_blocks = None
        idle = sorted((slot for slot in self._slots if not slot.busy), key=lambda slot: slot.released)
        shared, source = self._longest(tokens, tenant)
        if saved is not None and _loadable(tokens, tenant, saved, shared):
            self._load(idle[0], tokens[:-1], tenant, saved)
            shared, source = self._longest(tokens, tenant)
        n = whole_images(tokens, min(shared, len(tokens) - 1))
        slot = idle[0] if source is None else _choose_slot(source, shared, idle)
        self._note_drop(slot, n if slot is source else 0)
        slot.found = n
        slot.tokens = []  # stays empty if the cache raises, because the contents are then unknown
        slot.saved, slot.n_saved = saved, 0
        slot.is_lent = False
        slot.is_copy = source is not None and source is not slot
        if source is None or source is slot:
            kept = self._kv.truncate(slot.index, n)
        else:
            kept = self._kv.copy(source.index, slot.index, n)
        slot.tokens = tokens[: self._whole(slot, tokens, kept)]
        slot.tenant = tenant
        slot.busy = True
        return slot

    def _load(self, slot: Slot, tokens: list[int], tenant: str, saved: SavedPrefixes) -> None:
        """Replace the contents of an idle slot with the tenant's longest saved prefix of `tokens`."""
        self.forget(slot)
        began, kept = time.perf_counter(), None
        while kept is None:
            try:
                kept = saved.load(self._kv, slot.index, tokens, tenant)
            except KVFull:
                kept = None if self.forget_oldest_idle() else 0  # 0 if running requests need the cache
        slot.tokens, slot.tenant, slot.n_saved = tokens[:kept], tenant, kept
        if kept >= _LEAST_TIMED:
            self._loaded_token_s = (time.perf_counter() - began) / kept

    def save(self, saved: SavedPrefixes, most: int | None = None) -> bool:
        """Save the tokens of the most recently released slot that is idle and has unsaved tokens for these files.

        most  number of tokens to save, or None for all
        Returns whether more tokens may remain to be saved.
        """
        unsaved = [
            slot
            for slot in self._slots
            if slot.saved is saved
            and not slot.busy
            and len(slot.tokens) >= _LEAST_SAVED
            and slot.n_saved != len(slot.tokens)
        ]
        if not unsaved:
            return False
        slot = max(unsaved, key=lambda slot: slot.released)
        n = len(slot.tokens) if most is None else min(most, len(slot.tokens))
        if saved.save(self._kv, slot.index, slot.tokens, n, slot.tenant):
            return True
        slot.n_saved = len(slot.tokens)
        return len(unsaved) > 1

    def release(self, slot: Slot) -> None:
        """Mark the slot as idle. The slot keeps its tokens."""
        self._idle_blocks = None
        self._releases += 1
        slot.busy = False
        slot.released = self._releases

    def give_back(self, slot: Slot) -> None:
        """Undo `acquire` as far as possible. Copies are freed, or the source would have to copy shared blocks."""
        if slot.is_copy:
            self.forget(slot)
        else:
            self.release(slot)

    def truncate(self, slot: Slot, n: int) -> int:
        """Shorten a slot to its first n tokens. Returns how many tokens the cache kept."""
        held, slot.tokens = slot.tokens, []  # stays empty if the next line raises
        kept = self._kv.truncate(slot.index, n)
        kept = kept if kept == len(held) else self._whole(slot, held, kept)
        slot.tokens = held[:kept]
        return kept

    def _whole(self, slot: Slot, tokens: Sequence[int], kept: int) -> int:
        """Shorten a slot, whose first `kept` tokens are in the cache, until it does not end inside an image."""
        while (n := whole_images(tokens, kept)) < kept:
            kept = self._kv.truncate(slot.index, n)
        return kept

    def recount(self, slots: Iterable[Slot]) -> None:
        """After a cancelled pass, truncate the slots to the tokens that the cache still holds.

        A recurrent state that the pass had started to change is lost.
        """
        for slot in slots:
            self.truncate(slot, len(slot.tokens))

    def forget(self, slot: Slot) -> None:
        """Empty the slot and release it."""
        self._idle_blocks = None
        self._note_drop(slot, 0)
        slot.tokens = []
        slot.saved = None
        slot.busy = slot.is_lent = False
        slot.released = 0
        self._kv.free(slot.index)

    def _note_drop(self, slot: Slot, kept: int) -> None:
        """Record that the slot is about to lose all but the first `kept` tokens of its owner."""
        if slot.owner is not None and len(slot.tokens) > kept:
            self.drops[slot.owner] = time.monotonic()
            while len(self.drops) > _MOST_DROPS:
                del self.drops[next(iter(self.drops))]
        slot.owner = None

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
        """Empty and return the idle slot that was released first, or return None if no slot is idle.

        The slot stays idle, so the caller must call `keep` or `forget` before the next `acquire`.

        spared  slots to leave alone
        """
        idle = [slot for slot in self._slots if not slot.busy and slot not in spared]
        if not idle:
            return None
        slot = min(idle, key=lambda slot: slot.released)
        self.forget(slot)
        return slot

    def keep(self, slot: Slot, tokens: list[int]) -> list[int]:
        """Record the tokens of a slot from `lend`, and return the slot's token list, which is replaced on reuse.

        The slot will be the last idle slot to be emptied. Requests cannot reuse the tokens, and saving skips them.
        """
        self._idle_blocks = None
        self._releases += 1
        slot.tokens, slot.n_saved, slot.released, slot.is_lent = tokens, len(tokens), self._releases, True
        return tokens

    def _longest(self, tokens: list[int], tenant: str) -> tuple[int, Slot | None]:
        """Return the length of the tenant's longest cached prefix of `tokens`, and the newest slot with this prefix.

        Comparing a slot that shares 4,000 tokens takes 40 us.
        """
        found: Slot | None = None
        n = 0
        for slot in sorted(self._slots, key=lambda slot: (slot.busy, slot.released), reverse=True):
            if slot.tenant == tenant and not slot.is_lent and (shared := common_prefix(slot.tokens, tokens)) > n:
                n, found = shared, slot
        return whole_images(tokens, n), found


def _loadable(tokens: list[int], tenant: str, saved: SavedPrefixes | None, shared: int) -> int:
    """Return the length of the tenant's longest saved prefix, or 0 if loading it is not worthwhile.

    shared  the length of the longest cached prefix
    """
    stored = 0 if saved is None else saved.longest(tokens[:-1], tenant)
    return stored if stored >= shared + _LEAST_LOADED else 0


def _choose_slot(source: Slot, shared: int, idle: list[Slot]) -> Slot:
    """Return the slot for a request that shares its first `shared` tokens with `source`.

    If `source` is idle, it is given to a request that reuses at least half of its tokens, such as the next turn of a
    conversation. A request that shares no tokens is given `source`, too, because `source` is then the oldest idle slot.
    Any other request is given the oldest of the other idle slots, if there are any, to preserve the tokens in `source`.
    """
    others = [slot for slot in idle if slot is not source]
    if source.busy or (others and 0 < shared < len(source.tokens) / 2):
        return others[0]
    return source
