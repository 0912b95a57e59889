"""Computes the size of a KV cache from the number of tokens. Layers may have sliding windows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self, TypeVar

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class KVBytes:
    """The size in bytes of keys and values, as a function of the number of tokens.

    token    bytes per token in all layers without a window
    windows  (limit, bytes) pairs; layers that keep at most `limit` tokens use this many additional bytes per token
    """

    token: int
    windows: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_layers(cls, layers: Iterable[tuple[int, int]]) -> Self:
        """Sum the sizes of layers, given as (window in tokens, bytes per token). A window of 0 means no limit."""
        sums = Counter[int]()
        for tokens, n_bytes in layers:
            sums[tokens] += n_bytes
        return cls(sums.pop(0, 0), tuple(sorted(sums.items())))

    def of(self, tokens: Number) -> Number:
        """Return the size in bytes for a number of tokens, which may be a fractional average."""
        return tokens * self.token + sum(min(tokens, most) * n_bytes for most, n_bytes in self.windows)
