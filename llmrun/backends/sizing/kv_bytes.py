"""Bytes of keys and values, by how many tokens there are: layers that see a window only have no more than that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self, TypeVar

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class KVBytes:
    """token    of each token
    windows  (tokens, bytes) pairs: so many bytes of each token too, but of no more than so many tokens
    """

    token: int
    windows: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_layers(cls, layers: Iterable[tuple[int, int]]) -> Self:
        """From (tokens, bytes) of each layer; 0 tokens: all of them."""
        sums = Counter[int]()
        for tokens, n_bytes in layers:
            sums[tokens] += n_bytes
        return cls(sums.pop(0, 0), tuple(sorted(sums.items())))

    def of(self, tokens: Number) -> Number:
        """`tokens` may be a mean."""
        return tokens * self.token + sum(min(tokens, most) * n_bytes for most, n_bytes in self.windows)
