"""Computes the size of a cache, with or without sliding-window or recurrent layers, from the number of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self, TypeVar

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class KVBytes:
    """The size in bytes of keys and values, as a function of the number of tokens.

    token    bytes per token in all layers that have no sliding window
    windows  (limit, bytes per token) pairs for the other layers, which keep at most `limit` tokens
    states   bytes that do not depend on the number of tokens, such as recurrent states
    """

    token: int
    windows: tuple[tuple[int, int], ...] = ()
    states: int = 0

    @classmethod
    def of_layers(cls, layers: Iterable[tuple[int, int]], states: int = 0) -> Self:
        """Sum the sizes of layers, given as (window in tokens, bytes per token). A window of 0 means no limit."""
        sums = Counter[int]()
        for tokens, n_bytes in layers:
            sums[tokens] += n_bytes
        return cls(sums.pop(0, 0), tuple(sorted(sums.items())), states)

    def of(self, tokens: Number) -> Number:
        """Return the size in bytes for a number of tokens, which may be a fractional average."""
        windows = sum(min(tokens, most) * n_bytes for most, n_bytes in self.windows)
        return tokens * self.token + windows + self.states
