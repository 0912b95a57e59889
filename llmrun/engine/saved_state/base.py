"""The interface between the engine and saved prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from llmrun.backends.base import KVCache


class SavedPrefixes(Protocol):
    """Prefixes of the KV cache that are saved in files. Problems with files are reported and never raised."""

    def longest(self, tokens: list[int], tenant: str) -> int:
        """Return the length of the tenant's longest saved prefix of `tokens`."""

    def load(self, kv: KVCache, seq: int, tokens: list[int], tenant: str) -> int:
        """Replace the contents of a sequence with the longest saved prefix of `tokens`.

        Returns how many tokens the cache kept, which may be fewer if a file is damaged. Raises KVFull.
        """

    def save(self, kv: KVCache, seq: int, tokens: Sequence[int], n: int, tenant: str) -> bool:
        """Save some of the first n tokens of a sequence. Caches that cannot save a prefix save all tokens.

        Returns whether there may be more to save.
        """
