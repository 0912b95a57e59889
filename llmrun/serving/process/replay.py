"""Skips what a client already has when its request is run again."""

from __future__ import annotations

from hashlib import blake2b
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmrun.engine.requests import TextDelta


# All fields that make up the answer. The representation of the whole takes five times as long.
_content = attrgetter("text", "tokens", "logprobs", "reasoning", "unopened", "tentative", "tool_calls")


class ReplayDiffers(Exception):
    """The repeated answer differs from the one that the client has."""


class DeliveredDeltas:
    """The deltas of an answer that the client has, as a count and a digest, and those that a replay has repeated."""

    def __init__(self) -> None:
        self.count = 0
        self._digest = blake2b(digest_size=16)
        self._repeated = 0
        self._repeated_digest = blake2b(digest_size=16)

    @property
    def behind(self) -> bool:
        """True while a replay has not yet reached the end of what the client has."""
        return self._repeated < self.count

    def start_again(self) -> None:
        """Expect the answer from its beginning."""
        self._repeated = 0
        self._repeated_digest = blake2b(digest_size=16)

    def new_bytes(self, delta: TextDelta) -> int:
        """Return the approximate size of a delta in bytes, or 0 if the client already has it.

        Raises ReplayDiffers once the repeated deltas are complete but not the same.
        """
        described = repr(_content(delta)).encode("utf-8", "surrogatepass")
        if not self.behind:
            self.count += 1
            self._digest.update(described)
            self._repeated = self.count
            return len(described)
        self._repeated += 1
        self._repeated_digest.update(described)
        if not self.behind and self._repeated_digest.digest() != self._digest.digest():
            raise ReplayDiffers
        return 0
