"""How many tokens of context a model is opened with: as many as were asked for, if they fit, else as many as are
sensible."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Final

from llmrun.amounts import format_mebibytes
from llmrun.backends.sizing.footprint import Footprint
from llmrun.errors import DoesNotFit
from llmrun.gguf.problems import shown

# When nobody says. Chats rarely grow longer, though models of 131,072 tokens and more are common; memory that is not
# used is not taken (the cache is mapped, and zero until touched).
LARGEST_DEFAULT: Final = 32_768
# Where the cache is filled with zeros at once: all of it is paid for when the model is opened.
LARGEST_FILLED_DEFAULT: Final = 8_192

_LEAST_DEFAULT = 512  # less is of no use: rather all free memory than that
_LEAST_BITS = 1.6  # of any quantization there is
_STEP = 32  # whole blocks of the paged cache


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What a model takes, and what there is for it.

    footprint   bytes (footprint.py)
    free        bytes; None: the system does not say
    parameters  of the model; 0: nobody has counted
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
        """The context, in whole blocks, that takes half of what the model leaves free."""
        return self._context_in((self._room - self.footprint.mapped) // 2)

    @property
    def most_weights(self) -> int:
        """Bytes of weights that would fit, with the least context that is of use."""
        room = self._room + self.footprint.weights - self.footprint.mapped - self.footprint.cache.of(_LEAST_DEFAULT)
        return max(0, room)

    @property
    def most_bits(self) -> float:
        """Bits a parameter with which the weights would fit, with the least context that is of use."""
        return 8 * self.most_weights / self.parameters

    @property
    def _room(self) -> int:
        """For the cache; negative where not even the model fits."""
        assert self.free is not None
        return self.free - self.footprint.pinned

    def _context_in(self, room: int) -> int:
        """The most tokens, in whole blocks, whose cache takes no more; as many as there may be bytes where windows
        alone bound it."""
        cache = self.footprint.cache
        sizes = range(_STEP, room // max(1, cache.token) + 1, _STEP)
        return _STEP * bisect_right(sizes, room, key=cache.of)


def context_for(
    asked: int | None, *, train_context: int, largest_default: int, needs: MemoryNeeds, kv_type: str, path: str
) -> int:
    """`asked` as it is, or by default: what the model was trained for, at most `largest_default`, and at most what
    takes half of the memory that the weights leave free, but no less than 512 if those fit. Raises DoesNotFit."""
    if asked is not None:
        context = asked
    else:
        context = min(train_context, largest_default)
        if needs.free is not None and needs.comfortable < context:
            context = min(context, max(needs.comfortable, _LEAST_DEFAULT))
    if not needs.fits(context):
        raise _does_not_fit(context, needs, kv_type, path)
    return context


def _does_not_fit(context: int, needs: MemoryNeeds, kv_type: str, path: str) -> DoesNotFit:
    assert needs.free is not None
    needed = needs.footprint
    cache = needed.cache.of(context)
    besides = needed.scratch + needed.vocabulary
    parts = [
        *([f"weights of {format_mebibytes(needed.weights - needed.mapped)}"] if needed.weights > needed.mapped else []),
        *([f"scratch of {format_mebibytes(besides)}"] if besides else []),
        f"a KV cache of {context:,} tokens",
    ]
    verb = "takes" if len(parts) == 1 else f"of {format_mebibytes(cache)} take"
    words = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    sentence = f"out of memory: {shown(path, 300)}: {words} {verb} {format_mebibytes(needed.pinned + cache)}"
    sentence = f"{sentence}, free are {format_mebibytes(needs.free)}"
    if needs.most == 0:
        return DoesNotFit(sentence, hint=_what_would_fit(needs), most_weights=needs.most_weights)
    smaller = "" if kv_type == "q8_0" else ", --kv-type q8_0 takes half of it"
    return DoesNotFit(f"{sentence}, the most that fits is --ctx-size {needs.most}", hint=f"try that{smaller}")


def _what_would_fit(needs: MemoryNeeds) -> str:
    if needs.parameters and needs.most_bits >= _LEAST_BITS:
        bits = 8 * needs.footprint.weights / needs.parameters
        return f"try a quantization of at most {needs.most_bits:.1f} bits a weight, this one has {bits:.1f}"
    return "try a smaller model, or close other programs"
