"""Scalar functions that read blocks of integer weights in the file formats (quants/), used for packing.

In this module, a word holds 4 columns of one byte each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmrun.formats.layouts.linear import PACKED_TYPES, WIDE, WIDE_BYTES
from llmrun.formats.quants.registry import BY_NAME
from llmrun.kernels.code.load_store import load_u8, load_u16, load_u32, store_i16, store_i32, store_u8
from llmrun.kernels.compiler import inline_function

_NIBBLES = 0x0F0F0F0F
_PAIRS = 0x03030303
_BITS = 0x01010101


@dataclass(frozen=True, slots=True)
class BlockReader:
    """Inline functions that read a block of a file.

    The file's block starts at address `at` and covers `blocks` blocks of 32 columns.

    word(at, part, j)                return columns 4j to 4j + 3 of block `part`, unsigned except for 8-bit types
    store_scale(at, part, sub, to)   write the scale of a sub-block, f16 or a byte, to address `to`
    store_min(at, part, sub, to)     write the minimum of a sub-block in the same way
    store_uppers(at, scale, min)     write the upper-level scale and minimum, both f16, to two addresses; the minimum is
                                     negated, because the formats subtract it
    """

    blocks: int
    n_bytes: int
    word: Callable[..., Any]
    store_scale: Callable[..., Any]
    store_min: Callable[..., Any]
    store_uppers: Callable[..., Any]


@inline_function
def _nothing(at: Any, part: Any, sub: Any, to: Any) -> Any:
    return


@inline_function
def _no_uppers(at: Any, scale: Any, minimum: Any) -> Any:
    return


def _half_at(offset: int) -> Any:
    @inline_function
    def store(at: Any, part: Any, sub: Any, to: Any) -> Any:
        store_i16(to, load_u16(at + offset))

    return store


def _byte_at(offset: int) -> Any:
    @inline_function
    def store(at: Any, part: Any, sub: Any, to: Any) -> Any:
        store_u8(to, load_u8(at + offset))

    return store


def _uppers_at(scale_offset: int, min_offset: int) -> Any:
    @inline_function
    def store(at: Any, scale: Any, minimum: Any) -> Any:
        store_i16(scale, load_u16(at + scale_offset))
        if min_offset >= 0:
            store_i16(minimum, load_u16(at + min_offset) ^ 0x8000)

    return store


@inline_function
def _spread_bits(bits: Any) -> Any:
    """Spread 4 bits over 4 bytes. The multiplication shifts bit i by 7i places, to bit 8i."""
    return (bits * 0x00204081) & _BITS


def _nibble_word(offset: int) -> Any:
    """Return the `word` function for 32 nibbles in 16 bytes, where byte i holds columns i and i + 16."""

    @inline_function
    def word(at: Any, part: Any, j: Any) -> Any:
        return (load_u32(at + offset + 16 * part + 4 * (j & 3)) >> (4 * (j >> 2))) & _NIBBLES

    return word


def _five_bit_word(high_offset: int) -> Any:
    """Return the `word` function for Q5_0 and Q5_1, which store 32 high bits followed by the nibbles."""
    nibbles = _nibble_word(high_offset + 4)

    @inline_function
    def word(at: Any, part: Any, j: Any) -> Any:
        return nibbles(at, part, j) | _spread_bits((load_u32(at + high_offset) >> (4 * j)) & 15) << 4

    return word


@inline_function
def _byte_word(at: Any, part: Any, j: Any) -> Any:
    return load_u32(at + 2 + 4 * j)


# --- K-quants ---------------------------------------------------------------------------------------------------------


def _pair_word(offset: int) -> Any:
    """Return the `word` function for the nibbles of Q4_K and Q5_K.

    32 bytes hold two blocks, with the first block in the low nibbles.
    """

    @inline_function
    def word(at: Any, part: Any, j: Any) -> Any:
        return (load_u32(at + offset + 32 * (part >> 1) + 4 * j) >> (4 * (part & 1))) & _NIBBLES

    return word


_q4_k_word = _pair_word(16)
_q5_k_low = _pair_word(48)


@inline_function
def _q5_k_word(at: Any, part: Any, j: Any) -> Any:
    return _q5_k_low(at, part, j) | ((load_u32(at + 16 + 4 * j) >> part) & _BITS) << 4


@inline_function
def _q6_k_word(at: Any, part: Any, j: Any) -> Any:
    half, quarter = part >> 2, part & 3
    low = (load_u32(at + 64 * half + 32 * (quarter & 1) + 4 * j) >> (4 * (quarter >> 1))) & _NIBBLES
    return low | ((load_u32(at + 128 + 32 * half + 4 * j) >> (2 * quarter)) & _PAIRS) << 4


@inline_function
def _q3_k_word(at: Any, part: Any, j: Any) -> Any:
    low = (load_u32(at + 32 + 32 * (part >> 2) + 4 * j) >> (2 * (part & 3))) & _PAIRS
    return low | ((load_u32(at + 4 * j) >> part) & _BITS) << 2


@inline_function
def _q2_k_word(at: Any, part: Any, j: Any) -> Any:
    return (load_u32(at + 16 + 32 * (part >> 2) + 4 * j) >> (2 * (part & 3))) & _PAIRS


@inline_function
def _six_bits(at: Any, part: Any, first: Any) -> Any:
    """Return the six-bit scale (first = 0) or minimum (first = 4) with index `part`, from the 12 bytes at `at`.

    Parts 0 to 3 are the low 6 bits of a byte. For parts 4 to 7, the low 4 bits are in the last 4 bytes (scales in the
    low nibbles, minimums in the high nibbles), and the upper 2 bits are the top bits of the byte for `part - 4`.
    """
    if part < 4:
        return load_u8(at + first + part) & 63
    low = (load_u8(at + 4 + part) >> first) & 15
    return low | load_u8(at + first + part - 4) >> 6 << 4


@inline_function
def _k_scale(at: Any, part: Any, sub: Any, to: Any) -> Any:
    store_u8(to, _six_bits(at + 4, part, 0))


@inline_function
def _k_min(at: Any, part: Any, sub: Any, to: Any) -> Any:
    store_u8(to, _six_bits(at + 4, part, 4))


@inline_function
def _q6_k_scale(at: Any, part: Any, sub: Any, to: Any) -> Any:
    store_u8(to, load_u8(at + 192 + 2 * part + sub))


@inline_function
def _q3_k_scale(at: Any, part: Any, sub: Any, to: Any) -> Any:
    """Store one of 16 six-bit scales with an offset of 32.

    The file stores 16 nibbles in 8 bytes, then 16 pairs of upper bits in 4 bytes.
    """
    number = 2 * part + sub
    low = (load_u8(at + 96 + (number & 7)) >> (4 * (number >> 3))) & 15
    high = (load_u8(at + 104 + (number & 3)) >> (2 * (number >> 2))) & 3
    store_u8(to, (low | high << 4) - 32)


@inline_function
def _q2_k_scale(at: Any, part: Any, sub: Any, to: Any) -> Any:
    store_u8(to, load_u8(at + 2 * part + sub) & 15)


@inline_function
def _q2_k_min(at: Any, part: Any, sub: Any, to: Any) -> Any:
    store_u8(to, load_u8(at + 2 * part + sub) >> 4)


@inline_function
def _iq4_xs_scale(at: Any, part: Any, sub: Any, to: Any) -> Any:
    """Store one of 8 six-bit scales with an offset of 32.

    The file stores pairs of upper bits in a u16, then nibbles.
    """
    low = (load_u8(at + 4 + (part >> 1)) >> (4 * (part & 1))) & 15
    high = (load_u16(at + 2) >> (2 * part)) & 3
    store_u8(to, (low | high << 4) - 32)


# --- the wide type, which never occurs in files -----------------------------------------------------------------------


@inline_function
def _wide_word(at: Any, part: Any, j: Any) -> Any:
    return load_u32(at + 8 + 4 * j)


@inline_function
def _wide_scale(at: Any, part: Any, sub: Any, to: Any) -> Any:
    store_i32(to, load_u32(at + 4 * sub))


def _reader(name: str, word: Any, scale: Any = _nothing, minimum: Any = _nothing) -> BlockReader:
    """Create the reader for a weight type. Sizes and f16 fields are taken from the type's declaration."""
    type_ = BY_NAME[name.upper()]
    n_blocks, fields, two_levels = type_.block_weights // 32, type_.half_fields, PACKED_TYPES[name].two_levels
    if two_levels:
        uppers = _uppers_at(fields[0], fields[1] if len(fields) > 1 else -1)
        return BlockReader(n_blocks, type_.block_bytes, word, scale, minimum, uppers)
    scales = [_half_at(offset) for offset in fields] or [scale]
    return BlockReader(n_blocks, type_.block_bytes, word, scales[0], [*scales, minimum][1], _no_uppers)


BLOCK_READERS = {
    "q4_0": _reader("q4_0", _nibble_word(2)),
    "q4_1": _reader("q4_1", _nibble_word(4)),
    "q5_0": _reader("q5_0", _five_bit_word(2)),
    "q5_1": _reader("q5_1", _five_bit_word(4)),
    "q8_0": _reader("q8_0", _byte_word),
    "q2_k": _reader("q2_k", _q2_k_word, _q2_k_scale, _q2_k_min),
    "q3_k": _reader("q3_k", _q3_k_word, _q3_k_scale),
    "q4_k": _reader("q4_k", _q4_k_word, _k_scale, _k_min),
    "q5_k": _reader("q5_k", _q5_k_word, _k_scale, _k_min),
    "q6_k": _reader("q6_k", _q6_k_word, _q6_k_scale),
    "iq4_nl": _reader("iq4_nl", _nibble_word(2)),
    "iq4_xs": _reader("iq4_xs", _nibble_word(8), _iq4_xs_scale),
    "mxfp4": _reader("mxfp4", _nibble_word(1), _byte_at(0)),
    WIDE: BlockReader(1, WIDE_BYTES, _wide_word, _wide_scale, _nothing, _no_uppers),
}
