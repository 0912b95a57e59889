"""The size of a KV cache as a function of the number of tokens, including layers with sliding windows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self, TypeVar

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class KVBytes:
    """The bytes of keys and values as a function of the number of tokens.

    token    bytes per token in layers without a window
    windows  pairs (most, bytes): additional bytes per token in layers that keep at most `most` tokens
    """

    token: int
    windows: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_layers(cls, layers: Iterable[tuple[int, int]]) -> Self:
        """Add up layers. Each is a pair (window in tokens, bytes per token), with window 0 for no limit."""
        sums = Counter[int]()
        for tokens, n_bytes in layers:
            sums[tokens] += n_bytes
        return cls(sums.pop(0, 0), tuple(sorted(sums.items())))

    def of(self, tokens: Number) -> Number:
        """Return the bytes for a number of tokens, which may be a fractional average."""
        return tokens * self.token + sum(min(tokens, most) * n_bytes for most, n_bytes in self.windows)
