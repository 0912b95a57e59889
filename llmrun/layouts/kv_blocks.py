"""The paged KV cache's layout. Imports nothing, so that a caller need not load the compiler.

The cache of a layer is an array of blocks of 32 positions; a row's block table says which block holds its positions
32i to 32i + 31. In block b, KV head h has, one after the other (`HeadLayout` has the offsets):

    f16    keys float16[head size, 32], values float16[32, value size]
    q8_0   keys int8[head size, 32], their scales float16[groups, 32],
           values int8[32, value size], their scales float16[groups, 32]

so that both products of attention run along vectors: of positions for keys, of features for values. In q8_0 a group is
32 consecutive features of one position (the last group of a head whose size is no multiple of 32 has 16), and stands
for its integers times its scale, which is the group's largest magnitude / 127, rounded to float16. Before that, keys
of q8_0 are rotated by a Hadamard matrix (hadamard.py), and so are queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BLOCK: Final = 32  # positions in a block
GROUP: Final = 32  # features that share a scale, in q8_0
Q8_0: Final = "q8_0"

_HALF = 2


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Where one KV head's parts of a block begin, and how long they are, in bytes. Keys are at 0.

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
        """Of a key's or a value's feature."""
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
