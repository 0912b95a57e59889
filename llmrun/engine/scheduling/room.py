"""Keeps enough of the KV cache free that every running request can finish.

A request is admitted, and grows, only as long as all running requests can still reach their limits one after the other:
the one that needs the fewest blocks first, then the next one with the blocks that the first one held, and so on. This
is the banker's algorithm (Dijkstra, EWD 108) for a single resource. Requests that have to pause lose nothing but time,
so no request fails or is computed twice for lack of room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmrun.backends.base import KVCache
    from llmrun.engine.answer import Answer
    from llmrun.engine.slots import Slot


@dataclass(frozen=True, slots=True)
class Claim:
    """The blocks that a running request needs to reach its limit, and those that it gives back when it ends."""

    needed: int
    held: int


def all_can_finish(free: int, claims: Iterable[Claim]) -> bool:
    """Return whether requests can finish one after the other if `free` blocks are free now."""
    for claim in sorted(claims, key=lambda claim: claim.needed):
        if claim.needed > free:
            return False
        free += claim.held
    return True


class Room:
    """The room in the KV cache at the beginning of a step.

    is_ample  True if all requests can grow to their limits at the same time
    """

    def __init__(self, kv: KVCache, running: Mapping[Answer, Slot], free: int) -> None:
        """Compute the claims of the running requests. `free` includes blocks that only idle sequences hold."""
        self._kv = kv
        self._free = free
        # The last token of an answer is never run, so it takes no room.
        self._needed = {answer: kv.needed(slot.index, answer.limit - 1) for answer, slot in running.items()}
        # A request that runs alone can always finish: it may use the whole cache.
        self.is_ample = len(running) < 2 or sum(self._needed.values()) <= free
        self._claims: dict[Answer, Claim] = {}
        if not self.is_ample:
            self._claims = {
                answer: Claim(self._needed[answer], kv.held([slot.index])) for answer, slot in running.items()
            }

    @property
    def suffices(self) -> bool:
        """True if all running requests can finish."""
        return self.is_ample or all_can_finish(self._free, self._claims.values())

    def take(self, answer: Answer, slot: Slot, n: int) -> bool:
        """Take the blocks with which a request grows to n tokens, if all requests can still finish afterwards."""
        if self.is_ample:
            return True
        taken, claim = self._kv.needed(slot.index, n), self._claims[answer]
        if taken > self._free:
            return False
        after = {**self._claims, answer: Claim(max(0, claim.needed - taken), claim.held + taken)}
        if not all_can_finish(self._free - taken, after.values()):
            return False
        self._claims = after
        self._free -= taken
        return True
