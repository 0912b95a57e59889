"""The packed layouts that kernels use for integer weight types: bit planes, a table of integers, scales and minimums.

    weight = scale * integer + minimum

The bits of a value are stored in one or two planes (kernels/packing/pack.py), with the lowest bits in the first plane.
A scale is either a single number per 32 columns, or the product of two numbers: a small integer per 16 or 32 columns,
and a number per 256 columns. Both numbers and their product are exact in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

GROUP_ROWS = 16
BLOCK_COLUMNS = 32
SUPER_BLOCKS = 8  # number of blocks of 32 columns that share the scale stored per 256 columns


class Scales(StrEnum):
    """The ways in which scales are stored."""

    F16 = "f16"  # one f16 per 32 columns
    E8M0 = "e8m0"  # one power of two per 32 columns, stored as a byte with the value exponent + 128, as in ggml's MXFP4
    TWO_LEVELS = "two levels"  # one int8 per sub-block, times one f16 per 256 columns
    F32 = "f32"  # one float32 per sub-block


@dataclass(frozen=True, slots=True)
class PackedType:
    """The packed layout of one integer weight type.

    planes       bits per value in each plane: (4, 2) for 6-bit values, (8,) for signed bytes
    zero         zero point, subtracted from the unsigned value
    table        the 16 integers that 4-bit values index, or () if the values are used directly
    mins         whether each scale is paired with a minimum
    sub_columns  columns that share a scale (and a minimum): 16 or 32
    """

    planes: tuple[int, ...]
    zero: int = 0
    table: tuple[int, ...] = ()
    scales: Scales = Scales.F16
    mins: bool = False
    sub_columns: int = BLOCK_COLUMNS

    @property
    def bits(self) -> int:
        return sum(self.planes)

    @property
    def is_signed(self) -> bool:
        """Whether the values (or the integers in the table) are signed bytes. Unsigned values are at most 63."""
        return self.bits == 8 or bool(self.table)

    @property
    def sub_blocks(self) -> int:
        """The number of scales in a block of 32 columns."""
        return BLOCK_COLUMNS // self.sub_columns

    @property
    def scale_bytes(self) -> int:
        """The size in bytes of the scales of one row's block."""
        return {Scales.F16: 2, Scales.F32: 4}.get(self.scales, 1) * self.sub_blocks

    @property
    def block_bytes(self) -> int:
        """The size in bytes of a block of 16 rows x 32 columns, without the scales stored per 256 columns."""
        return GROUP_ROWS * (self.scale_bytes * (1 + self.mins) + BLOCK_COLUMNS * self.bits // 8)

    @property
    def whole_block_bytes(self) -> int:
        """The size in bytes of a block of 16 rows x 32 columns, with its share of the scales stored per 256 columns."""
        return self.block_bytes + self.two_levels * (1 + self.mins) * 2 * GROUP_ROWS // SUPER_BLOCKS

    @property
    def panel_block_bytes(self) -> int:
        """The size in bytes of an unpacked block of int8 weights and float32 scales and minimums (linear/tiles.py)."""
        return GROUP_ROWS * (BLOCK_COLUMNS + 4 * self.sub_blocks * (1 + self.mins))

    @property
    def two_levels(self) -> bool:
        return self.scales is Scales.TWO_LEVELS
