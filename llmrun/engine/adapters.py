"""Determines which LoRA adapters apply to which tokens of a request.

The keys and values of a token depend on the adapters of all tokens up to it. In slots and saved states, tokens with
adapters are therefore numbered differently from tokens without adapters (`AdaptedTokens.marked`). A prefix that was
computed with other adapters, or with another scale, never matches. Tokens before the start of an "activated LoRA" keep
their usual numbers, so requests without adapters can share this prefix.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from llmrun.base.errors import InvalidAnswer, LlmrunError, ModelFileError, UsageError
from llmrun.base.types import LARGEST_SCALE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.base.types import Adapter

_TOKEN_BITS: Final = 24  # enough for any vocabulary
_NUMBER_BITS: Final = 63  # the numbers must fit in an int64


@dataclass(frozen=True)
class AdaptedTokens:
    """The adapters of a request.

    adapters  the model's adapters
    scales    the scale of each adapter
    starts    the position from which each adapter is active, or None if it is not active
    """

    adapters: Sequence[Adapter]
    scales: Sequence[float]
    starts: Sequence[int | None]

    def rows(self, first: int, end: int) -> NDArray[np.float32]:
        """Return the scales at the positions from `first` to `end`, float32[positions, adapters]."""
        positions = np.arange(first, end)[:, None]
        starts = np.array([math.inf if start is None else start for start in self.starts])
        return np.where(positions >= starts, np.array(self.scales), 0).astype(np.float32)

    def marked(self, tokens: Sequence[int], first: int) -> list[int]:
        """Return the numbers under which tokens from position `first` on are cached.

        Rows of images have their numbers instead of tokens already (image_rows.py).

        The number of the first token with new adapters is a hash of 62 bits. The 39 bits that remain beside a token
        would be too few: with a graphics card, a client could find scales with equal hashes in minutes.
        """
        found = list(tokens)
        for start, digest in self._digests:
            mark = _leading_bits(digest, _NUMBER_BITS - _TOKEN_BITS) << _TOKEN_BITS
            for index in range(max(start - first, 0), len(found)):
                found[index] = tokens[index] | mark if tokens[index] >= 0 else _of_row(tokens[index], digest)
            if 0 <= (index := start - first) < len(found) and tokens[index] >= 0:
                own = hashlib.sha256(digest + tokens[index].to_bytes(4)).digest()
                found[index] = _leading_bits(own, _NUMBER_BITS - 1) | 1 << (_NUMBER_BITS - 1)  # larger than any token
        return found

    @cached_property
    def _digests(self) -> list[tuple[int, bytes]]:
        """The positions at which the active adapters change, each with a sha256 of the adapters active there."""
        digests = []
        for start in sorted({start for start in self.starts if start is not None}):
            active = [
                [adapter.identity, scale]
                for adapter, scale, begin in zip(self.adapters, self.scales, self.starts, strict=True)
                if scale and begin is not None and begin <= start
            ]
            if active:
                digests.append((start, hashlib.sha256(json.dumps(active).encode()).digest()))
        return digests


def _of_row(number: int, digest: bytes) -> int:
    """Return the number of a row of an image with adapters, which keeps the last bit of the row's own number."""
    own = hashlib.sha256(digest + number.to_bytes(8, signed=True)).digest()
    return -2 * _leading_bits(own, _NUMBER_BITS - 2) - 2 + (number & 1)


def _leading_bits(digest: bytes, n: int) -> int:
    """Return the first n bits of a sha256 as a number."""
    return int.from_bytes(digest) >> (8 * len(digest) - n)


def adapted_tokens(
    chosen: Mapping[str, float] | None, adapters: Sequence[Adapter], prompt: Sequence[int]
) -> AdaptedTokens | None:
    """Return the adapters of a request, or None if the request uses no adapters.

    chosen  maps names of adapters to scales; None for the scales with which the adapters were opened
    """
    by_name = {adapter.name: adapter.scale for adapter in adapters}
    scales = by_name if chosen is None else dict(chosen)
    used = [scales.get(adapter.name, 0.0) for adapter in adapters]
    starts = [_start(adapter, prompt) for adapter in adapters]
    if not any(scale and start is not None for scale, start in zip(used, starts, strict=True)):
        return None
    return AdaptedTokens(adapters, used, starts)


def scales_of_rows(parts: Sequence[tuple[AdaptedTokens | None, int, int]]) -> NDArray[np.float32] | None:
    """Return the scales of the rows of a step (Batch.scales), or None if no row uses adapters.

    parts  the adapters, the first position and the end of each part of the step
    """
    used = next((adapters for adapters, _, _ in parts if adapters is not None), None)
    if used is None:
        return None
    none = np.zeros((1, len(used.scales)), np.float32)
    return np.concatenate(
        [none.repeat(end - first, 0) if one is None else one.rows(first, end) for one, first, end in parts]
    )


def check_adapters(chosen: Mapping[str, float] | None, adapters: Sequence[Adapter]) -> None:
    """Check that a request's adapters are known and that their scales are in range. Raises UsageError."""
    names = [adapter.name for adapter in adapters]
    for name, scale in (chosen or {}).items():
        if name not in names:
            known = f"the model has {', '.join(names)}" if names else "the model was opened without any"
            raise UsageError(f"no such adapter: lora: {name}: {known}", hint="open the model with --lora NAME=FILE")
        if not abs(scale) <= LARGEST_SCALE:
            words = f"the scale of {name} is {scale:g}, not {-LARGEST_SCALE:g} to {LARGEST_SCALE:g}"
            raise UsageError(f"parameter out of range: lora: {words}")


def unless_of_adapters(error: LlmrunError, chosen: Mapping[str, float] | None) -> LlmrunError:
    """Return the error of a draw, or InvalidAnswer if the adapter scales of the request may have caused the error.

    In that case, the model file is not at fault, and repeating the request cannot succeed.
    """
    if isinstance(error, ModelFileError) and chosen and any(chosen.values()):
        return InvalidAnswer(f"no token can be chosen with these adapters: {error}", hint="use smaller scales")
    return error


def _start(adapter: Adapter, prompt: Sequence[int]) -> int | None:
    """Return the position at which an adapter becomes active: the last occurrence of its invocation tokens, if any."""
    if not adapter.invocation:
        return 0
    wanted, n = list(adapter.invocation), len(adapter.invocation)
    return next((at for at in range(len(prompt) - n, -1, -1) if prompt[at : at + n] == wanted), None)
