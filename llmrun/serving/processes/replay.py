"""Skips what a client already has when its request is run again."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmrun.engine.requests import TextDelta


# All fields but the id, which is the same in a replay.
_content = attrgetter("text", "tokens", "logprobs", "reasoning", "unopened", "tentative", "tool_calls")
_DELTA_BYTES = 130  # of a delta without text
_LOGPROB_BYTES = 80  # of each alternative of a token


class ReplayDiffers(Exception):
    """The repeated answer differs from the one that the client has."""


class DeliveredDeltas:
    """The deltas of an answer that the client has, as a count and a hash, and those that a replay has repeated."""

    def __init__(self) -> None:
        self.count = 0
        self._hash = 0
        self._repeated = 0
        self._repeated_hash = 0

    @property
    def behind(self) -> bool:
        """True while a replay has not yet reached the end of what the client has."""
        return self._repeated < self.count

    def start_again(self) -> None:
        """Expect the answer from its beginning."""
        self._repeated = 0
        self._repeated_hash = 0

    def new_bytes(self, delta: TextDelta) -> int:
        """Return the approximate size of a delta in bytes, or 0 if the client already has it.

        Raises ReplayDiffers once the repeated deltas are complete but not the same.
        """
        # Python's own hash takes a tenth of the time of a cryptographic digest, and nobody chooses what is compared.
        if not self.behind:
            self.count += 1
            self._hash = hash((self._hash, _content(delta)))
            self._repeated = self.count
            return _bytes_of(delta)
        self._repeated += 1
        self._repeated_hash = hash((self._repeated_hash, _content(delta)))
        if not self.behind and self._repeated_hash != self._hash:
            raise ReplayDiffers
        return 0


def _bytes_of(delta: TextDelta) -> int:
    n_alternatives = sum(1 + len(token.top) for token in delta.logprobs)
    arguments = sum(len(piece.arguments) for piece in delta.tool_calls)
    return _DELTA_BYTES + len(delta.text) + len(delta.reasoning) + arguments + _LOGPROB_BYTES * n_alternatives
