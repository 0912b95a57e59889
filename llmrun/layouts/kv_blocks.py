"""The layout of the paged KV cache. Importing this file does not load the compiler.

The cache of a layer is an array of blocks of 32 positions. Entry i of a row's block table is the index of the block for
positions 32i to 32i + 31. Within a block, each KV head has these arrays (`HeadLayout` contains their offsets):

    f16    keys float16[head size, 32], values float16[32, value size]
    q8_0   keys int8[head size, 32], their scales float16[groups, 32],
           values int8[32, value size], their scales float16[groups, 32]

With this order, both matrix products of attention use whole vectors, with one position per element for keys and one
feature per element for values.

In q8_0, a group is 32 consecutive features of one position. If the head size is not a multiple of 32, the last group
has 16 features. An element is its integer times the scale of its group. The scale is the largest magnitude in the group
divided by 127, rounded to float16. Keys are rotated by a Hadamard matrix (hadamard.py) before they are quantized to
q8_0, and queries are rotated in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BLOCK: Final = 32  # positions in a block
GROUP: Final = 32  # features that share a scale in q8_0
Q8_0: Final = "q8_0"

_HALF = 2


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """The offsets and sizes in bytes of one KV head's arrays in a block. Keys start at offset 0.

    kv_type     "f16" or "q8_0"
    head_size   features of a key, a multiple of 16
    value_size  features of a value, a multiple of 16
    """

    kv_type: str
    head_size: int
    value_size: int

    @property
    def has_scales(self) -> bool:
        return self.kv_type == Q8_0

    @property
    def element_bytes(self) -> int:
        """The size of one feature of a key or value."""
        return 1 if self.has_scales else _HALF

    @property
    def key_scales(self) -> int:
        return self.element_bytes * self.head_size * BLOCK

    @property
    def values(self) -> int:
        return self.key_scales + self._scale_bytes(self.head_size)

    @property
    def value_scales(self) -> int:
        return self.values + self.element_bytes * self.value_size * BLOCK

    @property
    def n_bytes(self) -> int:
        return self.value_scales + self._scale_bytes(self.value_size)

    def _scale_bytes(self, size: int) -> int:
        return _HALF * n_groups(size) * BLOCK if self.has_scales else 0


def n_groups(head_size: int) -> int:
    return -(-head_size // GROUP)
