"""The types of keys and values in the KV cache, and the notation of --kv-type. Importing this file loads no NumPy.

    f16    16 bits per element
    q8_0   8 bits and a float16 scale per group of 32 elements: 53 % of the memory of f16
    q4_0   4 bits and a float16 scale per group of 32 elements: 28 %

Elements of 4 bits are indices into the table of IQ4_NL, whose 16 values are closer together near zero (quants/iq4.py).
Scaled types are rotated by a Hadamard matrix before they are rounded (plan/stored_kv.py). Keys and values may have
different types: `q8_0:q4_0` stands for keys in q8_0 and values in q4_0.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from llmrun.base.sampling_texts import ListOfTexts

GROUP: Final = 32  # features that share a scale

_SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class KVType:
    """The form in which the cache stores keys or values.

    bits        size of an element
    has_scales  whether elements are rotated and share a scale per group of GROUP features
    """

    name: str
    bits: int
    has_scales: bool

    def n_bytes(self, elements: int) -> int:
        """Return the size of an even number of elements without their scales."""
        return self.bits * elements // 8

    def scale_bytes(self, size: int) -> int:
        """Return the size of the scales of one key or value of `size` features."""
        return _SCALE_BYTES * n_groups(size) if self.has_scales else 0

    def position_bytes(self, size: int) -> int:
        """Return the size of one key or value of `size` features, with its scales."""
        return self.n_bytes(size) + self.scale_bytes(size)


F16: Final = KVType("f16", 16, has_scales=False)
Q8_0: Final = KVType("q8_0", 8, has_scales=True)
Q4_0: Final = KVType("q4_0", 4, has_scales=True)
KV_TYPES: Final = {kind.name: kind for kind in (F16, Q8_0, Q4_0)}

_SEPARATOR = ":"


class KeysValues(NamedTuple):
    """The types of keys and values, as in `--kv-type q8_0:q4_0`."""

    keys: KVType
    values: KVType

    def __str__(self) -> str:
        """Return the shortest text that stands for these types."""
        return _SEPARATOR.join(dict.fromkeys(kind.name for kind in self))

    def position_bytes(self, head_size: int, value_size: int) -> int:
        """Return the size of the key and value of one head at one position."""
        return self.keys.position_bytes(head_size) + self.values.position_bytes(value_size)


@functools.lru_cache(maxsize=64)
def parse_kv_type(text: str) -> KeysValues:
    """Return the types that a text such as "q8_0" or "q8_0:q4_0" stands for. Raises ValueError with an unknown name."""
    names = text.split(_SEPARATOR)
    if len(names) > len(KeysValues._fields):
        raise ValueError(text)
    unknown = [name for name in names if name not in KV_TYPES]
    if unknown:
        raise ValueError(unknown[0])
    return KeysValues(KV_TYPES[names[0]], KV_TYPES[names[-1]])


def _advice(text: str) -> str:
    """Return the valid text that was probably meant, as for "q8" or "q8_0,q4_0"."""
    words = [word for word in re.split(r"[^a-z0-9_]+", text.lower()) if word]
    meant = [kind for word in words for kind in KV_TYPES.values() if kind.name.startswith(word)]
    if len(meant) != len(words) or not 1 <= len(words) <= len(KeysValues._fields):
        return ""
    return f"did you mean {KeysValues(meant[0], meant[-1])}?"


KV_TYPE: Final = ListOfTexts(
    lambda text: [kind.name for kind in parse_kv_type(text)],
    f"{', '.join(KV_TYPES)}, or a pair for keys and values, as in {KeysValues(Q8_0, Q4_0)}",
    _advice,
)
KV_CHOICES: Final = (
    *KV_TYPES,
    *(str(KeysValues(keys, values)) for keys in KV_TYPES.values() for values in KV_TYPES.values() if keys != values),
)


def n_groups(size: int) -> int:
    return -(-size // GROUP)
