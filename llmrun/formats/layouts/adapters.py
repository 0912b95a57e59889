"""The layout of the tables that tell kernels where the matrices of LoRA adapters are.

A unit is a part of an op's work for one adapter. Units are ordered by adapter.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from llmrun.formats.layouts.records import WORD

BLOCK_ROWS: Final = 4  # rows of a work item
EXPAND_GROUPS: Final = 16  # groups of 16 outputs of a work item of `expand`


class Unit(NamedTuple):
    """A unit. `factor` is a float32; the product with the scale of a row multiplies the low-rank product.

    weights      address of the packed matrix, or of one of its groups
    group_bytes  bytes from one group to the next
    columns      columns of the packed matrix, padded to a multiple of 4
    adapter      index of the adapter
    offset       bytes from the start of a row of low-rank products to those of the unit
    """

    weights: int
    group_bytes: int
    columns: int
    adapter: int
    offset: int
    factor: int


UNIT_BYTES: Final = WORD * len(Unit._fields)
UNIT_WEIGHTS, UNIT_GROUP_BYTES, UNIT_COLUMNS, UNIT_ADAPTER, UNIT_OFFSET, UNIT_FACTOR = range(0, UNIT_BYTES, WORD)
