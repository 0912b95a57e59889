"""The packed layouts that kernels use for integer weight types: bit planes, a table of integers, scales and minimums.

    weight = scale * integer + minimum

The bits of a value are stored in one or two planes, with the lowest bits in the first plane. A scale is either a single
number per 32 columns, or the product of two numbers: a small integer per 16 or 32 columns, and a number per 256
columns. Both numbers and their product are exact in float32.

Weights are packed in groups of 16 rows, one for each vector lane. A block is 32 columns of a group, and a group is a
sequence of segments of one, two or four blocks. Everything in a group is stored in the order in which a kernel that
multiplies one row reads it, because hardware prefetchers recognize consecutive reads:

    segment  scales of all blocks | minimums of all blocks | values of block 0 | values of block 1 | ...
    scales   f16, f32 or bytes [sub-blocks, 16] for each block; minimums have the same form
    values   the block's second plane (if any) | its first plane
    plane    uint8[bits, 16, 4] for vectors, rows and the columns of a quad; the lowest bits of vector v belong to
             quad v, the next ones to quad v + bits, and so on

A quad is 4 columns of a row, so a block has 8 quads per row. The last segment of a group may have fewer blocks, but its
scales and minimums take as much space. With two levels of scales, the numbers per 256 columns are called upper scales
and upper minimums, and have cache lines of their own. For types with minimums, such a line comes before every 8 blocks
and holds their upper scales and upper minimums, f16[16] each. For other types, it comes before every 16 blocks and
holds the upper scales of the first 8 and of the last 8. Groups and planes start on a cache line.

The order matters. On a Zen 4 with one thread and no software prefetching, Q6_K was read at

    27.8 GB/s  in this order
    17.0       with the second plane after the first
    11.0       with the values after the scales of 16 blocks
    13.2       with all scales, all first planes and all second planes of a group stored one after the other
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

GROUP_ROWS = 16
BLOCK_COLUMNS = 32
CACHE_LINE = 64
SUPER_BLOCKS = 8  # number of blocks of 32 columns that share the scale stored per 256 columns
_UPPER_BYTES = 2 * GROUP_ROWS  # size of a group's upper scales for 256 columns, and of its upper minimums


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

    # --- offsets in a group ------------------------------------------------------------------------------------------
    # `first` is the index of the first block of a segment, and `place` is the place of a block in the segment. They are
    # ints, arrays or a kernel's indices (kernels/code/unpack.py).

    @property
    def segment_blocks(self) -> int:
        """The number of blocks in a segment: the fewest whose scales and minimums fill whole cache lines."""
        blocks = 1
        while blocks * self.block_bytes % CACHE_LINE:
            blocks *= 2
        return blocks

    def scales_at(self, first: Any, place: Any) -> Any:
        """Return the offset in bytes of a block's scales. With two levels of scales, these are the lower ones."""
        return self._segment_at(first) + place * (GROUP_ROWS * self.scale_bytes)

    def mins_at(self, first: Any, place: Any) -> Any:
        """Return the offset in bytes of a block's minimums."""
        return self.scales_at(first, place) + self.segment_blocks * GROUP_ROWS * self.scale_bytes

    def values_at(self, plane: int, first: Any, place: Any) -> Any:
        """Return the offset in bytes of a block's values in a plane, the first (0) or the second one (1)."""
        value_bytes = CACHE_LINE * self.bits
        before = self.segment_blocks * (self.block_bytes - value_bytes)
        if plane == 0:
            before += CACHE_LINE * sum(self.planes[1:])
        return self._segment_at(first) + (place * value_bytes + before)

    def upper_scales_at(self, first: Any, place: Any) -> Any:
        """Return the offset in bytes of the scales that a block shares with the other blocks of its 256 columns."""
        line = self._segment_at(first // self._line_blocks * self._line_blocks) - CACHE_LINE
        return line + first % self._line_blocks // SUPER_BLOCKS * _UPPER_BYTES

    def upper_mins_at(self, first: Any, place: Any) -> Any:
        """Return the offset in bytes of the minimums that a block shares with the other blocks of its 256 columns."""
        return self.upper_scales_at(first, place) + _UPPER_BYTES

    def group_bytes(self, columns: int) -> int:
        """Return the size in bytes of a group of `columns` columns. It ends with the values of its last block."""
        place = (columns // BLOCK_COLUMNS - 1) % self.segment_blocks
        return int(self.values_at(0, columns // BLOCK_COLUMNS - 1 - place, place)) + CACHE_LINE * self.planes[0]

    @property
    def _line_blocks(self) -> int:
        """The number of blocks whose upper scales and minimums fill a cache line."""
        return CACHE_LINE // (_UPPER_BYTES * (1 + self.mins)) * SUPER_BLOCKS

    def _segment_at(self, first: Any) -> Any:
        """Return the offset in bytes of a segment."""
        at = first * self.block_bytes
        return at + (first // self._line_blocks + 1) * CACHE_LINE if self.two_levels else at
