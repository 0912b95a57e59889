"""How many tokens of context a model is opened with: as many as were asked for, if they fit, else as many as are
sensible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from llmrun.errors import DoesNotFit
from llmrun.gguf.problems import shown

# When nobody says. Chats rarely grow longer, though models of 131,072 tokens and more are common; memory that is not
# used is not taken (the cache is mapped, and zero until touched).
LARGEST_DEFAULT: Final = 32_768
# Where the cache is filled with zeros at once: all of it is paid for when the model is opened.
LARGEST_FILLED_DEFAULT: Final = 8_192

_LEAST_DEFAULT = 512  # less is of no use: rather all free memory than that
_STEP = 32  # whole blocks of the paged cache
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What a model takes, in bytes, and what there is for it.

    weights        of all matrices, as they lie in memory
    kv_token       of the KV cache, for one token of context in every sequence
    free           None: the system does not say
    weights_mapped they are mapped from their file, and need not all be in memory at once: only the cache must fit
    """

    weights: int
    kv_token: int
    free: int | None
    weights_mapped: bool = False

    def fits(self, context: int) -> bool:
        return self.free is None or self._pinned + context * self.kv_token <= self.free

    @property
    def most(self) -> int:
        """The largest context that fits, in whole blocks."""
        assert self.free is not None
        return max(0, (self.free - self._pinned) // max(1, self.kv_token) // _STEP * _STEP)

    @property
    def comfortable(self) -> int:
        """The context, in whole blocks, that takes half of what the weights leave free."""
        assert self.free is not None
        return max(0, (self.free - self.weights) // 2 // max(1, self.kv_token) // _STEP * _STEP)

    @property
    def _pinned(self) -> int:
        return 0 if self.weights_mapped else self.weights


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
    cache = context * needs.kv_token
    sentence = f"a KV cache of {context:,} tokens takes {_mebibytes(cache)}"
    if not needs.weights_mapped:
        sentence = (
            f"weights of {_mebibytes(needs.weights)} and {sentence.replace('takes', 'of')} "
            f"take {_mebibytes(needs.weights + cache)}"
        )
    sentence = f"out of memory: {shown(path, 300)}: {sentence}, free are {_mebibytes(needs.free)}"
    if needs.most == 0:
        return DoesNotFit(sentence, hint="try a smaller model, or close other programs")
    smaller = "" if kv_type == "q8_0" else ", --kv-type q8_0 takes half of it"
    return DoesNotFit(f"{sentence}, the most that fits is --ctx-size {needs.most}", hint=f"try that{smaller}")


def _mebibytes(n_bytes: int) -> str:
    return f"{n_bytes / _MIB:,.0f} MiB"
