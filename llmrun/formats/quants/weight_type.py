"""Weight types: each type's GGUF type ID and block size, and how to read, write, check and pack it.

The fields of a block are little-endian numbers, with the lowest bits first. The functions that round weights to integer
levels are shared by all types that gguf-py can write. They compute inverse scales from the float32 scale, before it is
rounded to f16.

The unpacked form of an integer weight type consists of integers and the factors that scale them:

    weight = (super_scale * sub_scale) * value - super_minimum * sub_minimum

All operations are in float32 and in this order, as in ggml. If a type lacks a factor, its multiplication is skipped.
An f16 has 11 significant bits, and in every type the sub-scale and the value have at most 12 together. The products are
therefore exact in any order. Only the subtraction rounds, once.

The packed layout of an integer weight type, which kernels use, has bit planes, a table of integers, scales and
minimums:

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

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

SUPER_BLOCK = 256  # weights per block, for types with both scales and sub-scales


def blocks_of(raw: NDArray[np.uint8], block_bytes: int) -> NDArray[np.uint8]:
    """Split the bytes into blocks: uint8[..., n block_bytes] -> uint8[..., n, block_bytes]."""
    raw = np.ascontiguousarray(raw)
    return raw.reshape(*raw.shape[:-1], raw.shape[-1] // block_bytes, block_bytes)


def halves(field: NDArray[np.uint8], times: float = 1.0) -> NDArray[np.float32]:
    """Decode f16 numbers and multiply them by a power of two: uint8[..., 2 n] -> float32[..., n].

    The result is exact if the power of two is near 1.
    """
    with np.errstate(invalid="ignore"):  # multiplying a signaling NaN would raise a warning
        return np.ascontiguousarray(field).view("<f2").astype(np.float32) * np.float32(times)


def half_bytes(numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Encode numbers as f16: float32[..., n] -> uint8[..., 2 n].

    Numbers are rounded to nearest even. Numbers beyond 65504 become infinite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return np.ascontiguousarray(numbers).astype("<f2").view(np.uint8)


def words16(field: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """Decode 16-bit words: uint8[..., 2 n] -> uint16[..., n]."""
    return np.ascontiguousarray(field).view("<u2").astype(np.uint16, copy=False)


def words32(field: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Decode 32-bit words: uint8[..., 4 n] -> uint32[..., n]."""
    return np.ascontiguousarray(field).view("<u4").astype(np.uint32, copy=False)


def planes(field: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Extract bit planes: uint8[..., m] -> uint8[..., 8 / bits, m].

    The first plane holds the lowest `bits` of every byte, the second plane the next `bits`, and so on.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return (field[..., None, :] >> shifts[:, None]) & np.uint8((1 << bits) - 1)


def sequence(field: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Extract consecutive `bits`-bit numbers: uint8[..., m] -> uint8[..., 8 m / bits].

    The numbers of the first byte come first, starting with its lowest bits.
    """
    parts = np.swapaxes(planes(field, bits), -1, -2)
    return parts.reshape(*field.shape[:-1], field.shape[-1] * (8 // bits))


def inverse(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute 1 / scale in float32. Returns 0 for a scale of 0, which occurs if all weights of a block are equal."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(scale == 0, np.float32(0), np.float32(1) / scale)


def around_zero(blocks: NDArray[np.float32], middle: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Quantize blocks symmetrically: float32[n, block] -> scale float32[n, 1], levels uint8[n, block].

    Levels are 0 to 2 * middle - 1, and weight = scale * (level - middle). The weight with the largest magnitude in a
    block becomes level 0.
    """
    widest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1, keepdims=True), axis=-1)
    with np.errstate(over="ignore", invalid="ignore"):
        scale = widest / np.float32(-middle)
        levels = np.trunc(blocks * inverse(scale) + np.float32(middle + 0.5))
        return scale, levels.astype(np.uint8).clip(0, 2 * middle - 1)


def above_the_least(
    blocks: NDArray[np.float32], greatest: int
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.uint8]]:
    """Quantize blocks with a minimum: float32[n, block] -> scale and minimum float32[n, 1], levels uint8[n, block].

    weight = scale * level + minimum. The smallest weight of a block becomes level 0, the largest becomes `greatest`.
    """
    minimum, maximum = blocks.min(axis=-1, keepdims=True), blocks.max(axis=-1, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore"):
        scale = (maximum - minimum) / np.float32(greatest)
        levels = np.trunc((blocks - minimum) * inverse(scale) + np.float32(0.5))
        return scale, minimum, levels.astype(np.uint8).clip(0, greatest)


def half_away_from_zero(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round to integers, with ties away from zero like C's `roundf`."""
    magnitude = np.abs(numbers)
    whole = np.floor(magnitude)
    rounded: NDArray[np.float32] = np.sign(numbers) * (whole + np.floor(np.float32(2) * (magnitude - whole)))
    return rounded


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


@dataclass(frozen=True, slots=True, eq=False)
class Unpacked:
    """Rows of n weights.

    values          int8[..., n]: the stored values after applying the offset, table or grid, and the sign
    super_block     number of weights that share a super-scale: 16, 32 or 256
    sub_block       number of weights that share a sub-scale: 16 or 32; for types without sub-scales, a number that is
                    at most `super_block`
    super_scales    float32[..., n / super_block]: the f16 scale from the file, or half of an 8-bit float scale. It is
                    divided by 8 for IQ1 and IQ2 and by 4 for IQ3_XXS, which is exact in float32 but not always in f16
    sub_scales      int16[..., n / sub_block]
    super_minimums  float32[..., n / super_block], subtracted; for Q4_1 and Q5_1 it is the negated stored minimum
    sub_minimums    int16[..., n / sub_block]
    """

    values: NDArray[np.int8]
    super_block: int
    sub_block: int
    super_scales: NDArray[np.float32]
    sub_scales: NDArray[np.int16] | None = None
    super_minimums: NDArray[np.float32] | None = None
    sub_minimums: NDArray[np.int16] | None = None


Unpack = Callable[[NDArray[np.uint8]], Unpacked]


def joined(
    n_rows_axes: int,
    values: NDArray[np.int8],
    *,
    super_scales: NDArray[np.float32],
    super_block: int,
    sub_block: int,
    sub_scales: NDArray[Any] | None = None,
    super_minimums: NDArray[np.float32] | None = None,
    sub_minimums: NDArray[Any] | None = None,
) -> Unpacked:
    """Concatenate the blocks of each row. Every array has shape [*rows, blocks, ...] with any number of inner axes."""

    def join(array: NDArray[Any], dtype: Any) -> Any:
        rows, within = array.shape[:n_rows_axes], array.shape[n_rows_axes:]
        return array.astype(dtype, copy=False).reshape(*rows, math.prod(within))

    return Unpacked(
        join(values, np.int8),
        super_block,
        sub_block,
        join(super_scales, np.float32),
        None if sub_scales is None else join(sub_scales, np.int16),
        None if super_minimums is None else join(super_minimums, np.float32),
        None if sub_minimums is None else join(sub_minimums, np.int16),
    )


def dequantize_unpacked(weights: Unpacked) -> NDArray[np.float32]:
    """Compute the weights float32[..., n] by the formula for the unpacked form.

    Warnings are suppressed: an infinite scale times 0 is NaN, as in C.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        scales = _products(weights.super_scales, weights.sub_scales)
        products = _grouped(weights.values, scales) * scales[..., None]
        if weights.super_minimums is not None:
            minimums = _products(weights.super_minimums, weights.sub_minimums)
            products = products - minimums[..., None]
    return products.reshape(weights.values.shape)


def _products(factors: NDArray[np.float32], integers: NDArray[np.int16] | None) -> NDArray[np.float32]:
    """Multiply factors float32[..., s] by integers int16[..., s k] -> float32[..., s k].

    Without integers, return the factors.
    """
    if integers is None:
        return factors
    return (_grouped(integers, factors) * factors[..., None]).reshape(integers.shape)


def _grouped(integers: NDArray[Any], factors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Reshape integers [..., s k] -> float32[..., s, k], so that each of the s factors has its own row."""
    count = integers.shape[-1] // max(factors.shape[-1], 1)
    return integers.astype(np.float32).reshape(*factors.shape, count)


Dequantize = Callable[[NDArray[np.uint8]], NDArray[np.float32]]
Quantize = Callable[[NDArray[np.float32]], NDArray[np.uint8]]
FindUnsound = Callable[[NDArray[np.uint8]], NDArray[np.bool_]]

_HALF_EXPONENT = np.uint16(0x7C00)  # the exponent of NaN and infinity, with all bits set


@dataclass(frozen=True)
class WeightType:
    """A format for storing weights: `block_weights` consecutive weights of a row take `block_bytes` bytes.

    ggml_id       the type's ID in ggml's `enum ggml_type`, as stored in the file
    dequantize    the reference decoder, uint8[..., blocks * block_bytes] -> float32[..., blocks * block_weights]; None
                  for types that the format defines but llmrun cannot read
    quantize      the inverse of `dequantize`, which rounds like gguf-py; None if gguf-py cannot write the type
    unpack        splits the same bytes into the integers and scales (Unpacked) that `dequantize` multiplies; None
                  for float types
    half_fields   offsets of the f16 fields in a block: the scale, then the minimum
    other_scales  uint8[n, block_bytes] -> bool[n]: a mask of the blocks with a NaN or an infinity in a scale that is
                  not f16
    packed        the layout in which the kernels store the integers; None for float types and for types packed as bytes
    """

    name: str
    ggml_id: int
    block_weights: int
    block_bytes: int
    dequantize: Dequantize | None = None
    quantize: Quantize | None = None
    unpack: Unpack | None = None
    half_fields: tuple[int, ...] = ()
    other_scales: FindUnsound | None = None
    packed: PackedType | None = None

    def row_bytes(self, n: int) -> int:
        """Return the size in bytes of a row of n weights. Raises ValueError if n is not a whole number of blocks."""
        blocks, rest = divmod(n, self.block_weights)
        if rest:
            raise ValueError(
                f"{n} weights are not a whole number of {self.name} blocks of {self.block_weights} weights"
            )
        return blocks * self.block_bytes


def integer_type(
    name: str,
    ggml_id: int,
    block_weights: int,
    block_bytes: int,
    unpack: Unpack,
    quantize: Quantize | None = None,
    *,
    half_fields: tuple[int, ...] = (),
    other_scales: FindUnsound | None = None,
    packed: PackedType | None = None,
) -> WeightType:
    """Create a weight type made of integers and scales. `dequantize` is derived from `unpack`."""
    return WeightType(
        name,
        ggml_id,
        block_weights,
        block_bytes,
        lambda raw: dequantize_unpacked(unpack(raw)),
        quantize,
        unpack,
        half_fields,
        other_scales,
        packed,
    )


def all_set(words: NDArray[np.unsignedinteger], bits: np.unsignedinteger) -> NDArray[np.bool_]:
    """Return a mask of the words in which all of the given bits are set."""
    found: NDArray[np.bool_] = (words & bits) == bits
    return found


def unsound_halves(words: NDArray[np.uint16]) -> NDArray[np.bool_]:
    """Return a mask of the f16 numbers that are NaN or infinite."""
    return all_set(words, _HALF_EXPONENT)


def unsound_half_field(blocks: NDArray[np.uint8], offset: int) -> NDArray[np.bool_]:
    """Return a mask of the blocks whose f16 field at `offset` is NaN or infinite: uint8[n, block_bytes] -> bool[n]."""
    return unsound_halves(words16(blocks[:, offset : offset + 2])[:, 0])
