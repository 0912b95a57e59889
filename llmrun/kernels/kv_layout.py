"""The paged KV cache's layout. Imports nothing, so that a caller need not load the compiler.

The cache of a layer is an array of blocks of 32 positions; a row's block table says which block holds its positions
32i to 32i + 31. In block b, KV head h has, one after the other (`HeadLayout` has the offsets):

    f16    keys float16[head size, 32], values float16[32, head size]
    q8_0   keys int8[head size, 32], their scales float16[groups, 32],
           values int8[32, head size], their scales float16[groups, 32]

so that both products of attention run along vectors: of positions for keys, of features for values. In q8_0 a group is
32 consecutive features of one position (the last group of a head whose size is no multiple of 32 has 16), and stands
for its integers times its scale, which is the group's largest magnitude / 127, rounded to float16. Keys of q8_0 are
spread out before (spread.py), and queries are spread to meet them.
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
    """Where one KV head's parts of a block begin, and how long they are, in bytes. Keys are at 0."""

    element_bytes: int  # of a key's or a value's feature
    key_scales: int
    values: int
    value_scales: int
    n_bytes: int

    @classmethod
    def of(cls, kv_type: str, head_size: int) -> HeadLayout:
        """Of `kv_type` "f16" or "q8_0"; head_size a multiple of 16."""
        element_bytes = 1 if kv_type == Q8_0 else _HALF
        n_elements = element_bytes * head_size * BLOCK
        n_scales = _HALF * n_groups(head_size) * BLOCK if kv_type == Q8_0 else 0
        values = n_elements + n_scales
        return cls(element_bytes, n_elements, values, values + n_elements, 2 * values)


def n_groups(head_size: int) -> int:
    return -(-head_size // GROUP)
