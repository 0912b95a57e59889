"""Chooses a model's context size, which is the requested size if it fits in memory, or a sensible default."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Final

from llmrun.backends.sizing.footprint import Footprint
from llmrun.base.amounts import format_mebibytes
from llmrun.base.errors import DoesNotFit
from llmrun.formats.gguf.problems import shown
from llmrun.formats.layouts.kv_types import F16, Q4_0, Q8_0, parse_kv_type

# The largest default context. Many models support 131,072 tokens or more, but chats rarely grow longer than this.
# Unused parts of the cache cost nothing, because the system allocates pages on first use.
LARGEST_DEFAULT: Final = 32_768
# The largest default context for caches that are filled with zeros when the model is opened, so that all of their
# memory is in use.
LARGEST_FILLED_DEFAULT: Final = 8_192

# Smaller contexts are useless, so a default of up to this many tokens may use all free memory.
_LEAST_DEFAULT = 512
_LEAST_BITS = 1.6  # bits per weight of the smallest existing quantization
_STEP = 32  # tokens per block of the paged cache


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """The memory that a model needs, and the memory that is free.

    footprint   the memory that the model needs (footprint.py)
    free        free memory in bytes, or None if the system does not report it
    parameters  number of parameters in the model, or 0 if unknown
    """

    footprint: Footprint
    free: int | None
    parameters: int = 0

    def fits(self, context: int) -> bool:
        return self.free is None or self.footprint.pinned + self.footprint.cache.of(context) <= self.free

    @property
    def most(self) -> int:
        """The largest context that fits, in whole blocks."""
        return self._context_in(self._room)

    @property
    def comfortable(self) -> int:
        """The context, in whole blocks, whose cache takes half of the memory that the model leaves free."""
        return self._context_in((self._room - self.footprint.mapped) // 2)

    @property
    def most_weights(self) -> int:
        """The size in bytes of the largest weights that would fit together with the smallest useful context."""
        room = self._room + self.footprint.weights - self.footprint.mapped - self.footprint.cache.of(_LEAST_DEFAULT)
        return max(0, room)

    @property
    def most_bits(self) -> float:
        """The largest number of bits per parameter that would fit together with the smallest useful context."""
        return 8 * self.most_weights / self.parameters

    @property
    def _room(self) -> int:
        """The number of free bytes for the cache. It is negative if the model alone does not fit."""
        assert self.free is not None
        return self.free - self.footprint.pinned

    def _context_in(self, room: int) -> int:
        """Return the largest context, in whole blocks, whose cache fits in `room` bytes.

        If all layers have sliding windows, the cache stops growing and the result is limited to `room` tokens.
        """
        cache = self.footprint.cache
        sizes = range(_STEP, room // max(1, cache.token) + 1, _STEP)
        return _STEP * bisect_right(sizes, room, key=cache.of)


def context_for(
    asked: int | None, *, train_context: int, largest_default: int, needs: MemoryNeeds, kv_type: str, path: str
) -> int:
    """Return the context size to use, in tokens. Raises DoesNotFit if there is not enough memory.

    The result is `asked` unless that is None. The default is the trained context, limited to `largest_default` and to
    half of the memory that the weights leave free. This memory limit does not reduce it below 512 tokens.
    """
    if asked is not None:
        context = asked
    else:
        context = min(train_context, largest_default)
        if needs.free is not None and needs.comfortable < context:
            context = min(context, max(needs.comfortable, _LEAST_DEFAULT))
    check_cache_fits(context, needs, kv_type, path, flag="--ctx-size")
    return context


def check_cache_fits(tokens: int, needs: MemoryNeeds, kv_type: str, path: str, *, flag: str) -> None:
    """Raise DoesNotFit if a cache of this many tokens does not fit in the free memory. `flag` sets its size."""
    if not needs.fits(tokens):
        raise _does_not_fit(tokens, needs, kv_type, path, flag)


def shared_cache_tokens(context_size: int, max_sequences: int, needs: MemoryNeeds) -> int:
    """Return the size of a cache that several sequences share, in tokens (`OpenOptions.kv_tokens`).

    The cache holds a full context for every sequence if that takes at most half of the memory that the model leaves
    free. Otherwise it takes half of that memory, but always holds at least one context. `needs` are the needs of
    `max_sequences` sequences.
    """
    each = context_size if needs.free is None else min(context_size, needs.comfortable)
    return max(context_size, max_sequences * each)


def _does_not_fit(context: int, needs: MemoryNeeds, kv_type: str, path: str, flag: str) -> DoesNotFit:
    assert needs.free is not None
    needed = needs.footprint
    cache = needed.cache.of(context)
    buffers = needed.scratch + needed.vocabulary
    parts = [
        *([f"weights ({format_mebibytes(needed.weights - needed.mapped)})"] if needed.weights > needed.mapped else []),
        *([f"buffers ({format_mebibytes(buffers)})"] if buffers else []),
        f"a KV cache of {context:,} tokens",
    ]
    verb = "needs" if len(parts) == 1 else f"({format_mebibytes(cache)}) need"
    words = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    sentence = f"not enough memory for {shown(path, 300)}: {words} {verb} {format_mebibytes(needed.pinned + cache)}"
    sentence = f"{sentence}, but only {format_mebibytes(needs.free)} is free"
    if needs.most == 0:
        return DoesNotFit(sentence, hint=_quantization_hint(needs), most_weights=needs.most_weights)
    return DoesNotFit(sentence, hint=f"try {flag} {needs.most}, the largest that fits{_smaller_type(kv_type)}")


def _smaller_type(kv_type: str) -> str:
    """Return the rest of a hint that recommends a smaller type of KV cache, or an empty string."""
    types = parse_kv_type(kv_type)
    if F16 in types:
        return f", or --kv-type {Q8_0.name}, which halves the KV cache"
    if Q8_0 in types:
        return f", or --kv-type {Q4_0.name}, which halves the KV cache again but is less accurate"
    return ""


def _quantization_hint(needs: MemoryNeeds) -> str:
    if needs.parameters and needs.most_bits >= _LEAST_BITS:
        bits = 8 * needs.footprint.weights / needs.parameters
        return f"try a quantization with at most {needs.most_bits:.1f} bits per weight (this one has {bits:.1f})"
    return "try a smaller model, or close other programs"
