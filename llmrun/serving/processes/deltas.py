"""Keeps track of the pieces of an answer that a client has, for when another process repeats the answer."""

from __future__ import annotations

from llmrun.engine.requests import PromptDelta, TextDelta

_DELTA_BYTES = 130  # the size of a delta without text
_LOGPROB_BYTES = 80  # the size of each alternative of a token


class ReplayDiffers(Exception):
    """The repeated answer differs from the part that the client has already received."""


class DeliveredDeltas:
    """The deltas that the client has received and the deltas that a replay has repeated, each as a count and a hash."""

    def __init__(self) -> None:
        self.count = 0
        self._hash = 0
        self._repeated = 0
        self._repeated_hash = 0

    @property
    def behind(self) -> bool:
        """True while a replay has not yet repeated all deltas that the client has."""
        return self._repeated < self.count

    def start_again(self) -> None:
        """Prepare for a replay that repeats the answer from its beginning."""
        self._repeated = 0
        self._repeated_hash = 0

    def new_bytes(self, delta: PromptDelta | TextDelta) -> int:
        """Return the approximate size of a delta in bytes, or 0 if the client already has the delta.

        Raises ReplayDiffers if all deltas have been repeated but their hash differs.
        """
        # Python's hash takes a tenth of the time of a cryptographic digest, and no attacker can choose the input.
        if not self.behind:
            self.count += 1
            self._hash = hash((self._hash, delta))
            self._repeated = self.count
            return _bytes_of(delta)
        self._repeated += 1
        self._repeated_hash = hash((self._repeated_hash, delta))
        if not self.behind and self._repeated_hash != self._hash:
            raise ReplayDiffers
        return 0


def _bytes_of(delta: PromptDelta | TextDelta) -> int:
    n_alternatives = sum(1 + len(token.top) for token in delta.logprobs)
    size = _DELTA_BYTES + len(delta.text) + _LOGPROB_BYTES * n_alternatives
    if isinstance(delta, PromptDelta):
        return size
    return size + len(delta.reasoning) + sum(len(piece.arguments) for piece in delta.tool_calls)
