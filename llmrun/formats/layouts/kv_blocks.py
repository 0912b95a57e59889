"""The layout of the paged KV cache. Importing this file does not load the compiler.

The cache of a layer is an array of blocks of 32 positions. Entry i of a row's block table is the index of the block for
positions 32i to 32i + 31. Within a block, each KV head has these arrays (`HeadLayout` contains their offsets):

    keys    elements [head size, 32], their scales float16[groups, 32]
    values  elements [32, value size], their scales float16[groups, 32]

With this order, both matrix products of attention use whole vectors, with one position per element for keys and one
feature per element for values.

Elements are float16, int8 or 4-bit indices, and float16 elements have no scales (kv_types.py). Two indices share a
byte. In keys, byte [i, p] holds features 2i (low half) and 2i + 1 (high half) of position p, so that rows of different
positions never write to the same byte. In values, 8 bytes hold 16 consecutive features: byte j holds features j and
j + 8.

A group is 32 consecutive features of one position. If the head size is not a multiple of 32, the last group has 16
features. A number is its integer, or the table's entry for its index, times the scale of its group. stored_kv.py
defines how numbers are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from llmrun.formats.layouts.kv_types import KVType

BLOCK: Final = 32  # positions in a block


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """The offsets and sizes in bytes of one KV head's arrays in a block. Keys start at offset 0.

    keys, values  the types of the elements
    head_size     features of a key, a multiple of 16
    value_size    features of a value, a multiple of 16
    """

    keys: KVType
    values: KVType
    head_size: int
    value_size: int

    @property
    def key_scales(self) -> int:
        return self.keys.n_bytes(self.head_size * BLOCK)

    @property
    def values_at(self) -> int:
        return BLOCK * self.keys.position_bytes(self.head_size)

    @property
    def value_scales(self) -> int:
        return self.values_at + self.values.n_bytes(self.value_size * BLOCK)

    @property
    def n_bytes(self) -> int:
        return self.values_at + BLOCK * self.values.position_bytes(self.value_size)

    @property
    def row_features(self) -> int:
        """The number of features in one row of keys, whose elements share the row's bytes."""
        return 2 if self.keys.bits == 4 else 1

    @property
    def key_row_bytes(self) -> int:
        return self.keys.n_bytes(self.row_features * BLOCK)
