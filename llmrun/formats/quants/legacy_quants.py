"""Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0: blocks of 32 weights with a scale. Q4_1 and Q5_1 also have a minimum.

    Q4_0, 18 bytes, 4.5 bits per weight      Q4_1, 20 bytes, 5 bits per weight

    offset  bytes  field                     offset  bytes  field
    0       2      scale    f16              0       2      scale    f16
    2       16     nibbles                   2       2      minimum  f16
                                             4       16     nibbles

    weight[i] = scale * (nibble[i] - 8)      weight[i] = scale * nibble[i] + minimum

Byte j of the nibbles holds weight j in its low half and weight j + 16 in its high half.

    Q5_0, 22 bytes, 5.5 bits per weight      Q5_1, 24 bytes, 6 bits per weight

    offset  bytes  field                     offset  bytes  field
    0       2      scale      f16            0       2      scale      f16
    2       4      high bits  u32            2       2      minimum    f16
    6       16     nibbles                   4       4      high bits  u32
                                             8       16     nibbles

    weight[i] = scale * (level[i] - 16)      weight[i] = scale * level[i] + minimum

Byte j of the nibbles holds the low 4 bits of level j in its low half, and the low 4 bits of level j + 16 in its high
half. The fifth bit of level i is bit i of the high bits.

    Q8_0, 34 bytes, 8.5 bits per weight

    offset  bytes  field
    0       2      scale    f16
    2       32     values   int8

    weight[i] = scale * values[i]
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmrun.formats.quants.weight_type import (
    PackedType,
    Unpacked,
    above_the_least,
    around_zero,
    blocks_of,
    half_away_from_zero,
    half_bytes,
    halves,
    integer_type,
    inverse,
    joined,
    planes,
    sequence,
)

BLOCK_WEIGHTS = 32
Q4_0_BYTES = 18
Q4_1_BYTES = 20


def unpack_q4_0(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 18 n] -> 32 n weights: values -8 to 7, with a scale per 32 weights."""
    blocks = blocks_of(raw, Q4_0_BYTES)
    values = planes(blocks[..., 2:], 4).astype(np.int8) - np.int8(8)
    return joined(raw.ndim - 1, values, super_scales=halves(blocks[..., :2]), super_block=32, sub_block=32)


def unpack_q4_1(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 20 n] -> 32 n weights: values 0 to 15, with a scale and a minimum per 32 weights."""
    blocks = blocks_of(raw, Q4_1_BYTES)
    return joined(
        raw.ndim - 1,
        planes(blocks[..., 4:], 4).astype(np.int8),
        super_scales=halves(blocks[..., 0:2]),
        super_minimums=-halves(blocks[..., 2:4]),
        super_block=32,
        sub_block=32,
    )


def quantize_q4_0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Encode float32[..., 32 n] -> uint8[..., 18 n].

    The weights must be finite. The weight with the largest magnitude becomes -8 times the scale.
    """
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, BLOCK_WEIGHTS)
    packed = pack_q4_0(*around_zero(blocks, 8))
    return packed.reshape(*values.shape[:-1], values.shape[-1] // BLOCK_WEIGHTS * Q4_0_BYTES)


def quantize_q4_1(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Encode float32[..., 32 n] -> uint8[..., 20 n].

    The weights must be finite. The smallest weight becomes level 0 and the largest becomes level 15.
    """
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, BLOCK_WEIGHTS)
    scale, minimum, levels = above_the_least(blocks, 15)
    packed = np.concatenate([half_bytes(scale), half_bytes(minimum), _pack_q4(levels)], axis=-1)
    return packed.reshape(*values.shape[:-1], values.shape[-1] // BLOCK_WEIGHTS * Q4_1_BYTES)


def pack_q4_0(scale: NDArray[np.float32], levels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack scales float32[n, 1], rounded to f16, and levels uint8[n, 32] from 0 to 15 -> uint8[n, 18]."""
    return np.concatenate([half_bytes(scale), _pack_q4(levels)], axis=-1)


def _pack_q4(nibbles: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return nibbles[:, :16] | (nibbles[:, 16:] << np.uint8(4))


Q5_0_BYTES = 22
Q5_1_BYTES = 24


def unpack_q5_0(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 22 n] -> 32 n weights: values -16 to 15, with a scale per 32 weights."""
    blocks = blocks_of(raw, Q5_0_BYTES)
    values = _levels(blocks[..., 2:]).astype(np.int8) - np.int8(16)
    return joined(raw.ndim - 1, values, super_scales=halves(blocks[..., :2]), super_block=32, sub_block=32)


def unpack_q5_1(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 24 n] -> 32 n weights: values 0 to 31, with a scale and a minimum per 32 weights."""
    blocks = blocks_of(raw, Q5_1_BYTES)
    return joined(
        raw.ndim - 1,
        _levels(blocks[..., 4:]).astype(np.int8),
        super_scales=halves(blocks[..., 0:2]),
        super_minimums=-halves(blocks[..., 2:4]),
        super_block=32,
        sub_block=32,
    )


def quantize_q5_0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Encode float32[..., 32 n] -> uint8[..., 22 n].

    The weights must be finite. The weight with the largest magnitude becomes -16 times the scale.
    """
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, BLOCK_WEIGHTS)
    packed = pack_q5_0(*around_zero(blocks, 16))
    return packed.reshape(*values.shape[:-1], values.shape[-1] // BLOCK_WEIGHTS * Q5_0_BYTES)


def quantize_q5_1(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Encode float32[..., 32 n] -> uint8[..., 24 n].

    The weights must be finite. The smallest weight becomes level 0 and the largest becomes level 31.
    """
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, BLOCK_WEIGHTS)
    scale, minimum, levels = above_the_least(blocks, 31)
    packed = np.concatenate([half_bytes(scale), half_bytes(minimum), *_pack_q5(levels)], axis=-1)
    return packed.reshape(*values.shape[:-1], values.shape[-1] // BLOCK_WEIGHTS * Q5_1_BYTES)


def pack_q5_0(scale: NDArray[np.float32], levels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack scales float32[n, 1], rounded to f16, and levels uint8[n, 32] from 0 to 31 -> uint8[n, 22]."""
    return np.concatenate([half_bytes(scale), *_pack_q5(levels)], axis=-1)


def _levels(field: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Combine the high bits and nibbles: uint8[..., 20] -> uint8[..., 32]."""
    fifth = sequence(field[..., :4], 1)
    nibbles = planes(field[..., 4:], 4)
    return nibbles.reshape(fifth.shape) | (fifth << np.uint8(4))


def _pack_q5(levels: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    fifth = np.packbits(levels >> np.uint8(4), axis=-1, bitorder="little")
    return fifth, (levels[:, :16] & np.uint8(15)) | (levels[:, 16:] << np.uint8(4))


Q8_0_BYTES = 34


def unpack_q8_0(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 34 n] -> 32 n weights: values -128 to 127, with a scale per 32 weights."""
    blocks = blocks_of(raw, Q8_0_BYTES)
    values = blocks[..., 2:].view(np.int8)
    return joined(raw.ndim - 1, values, super_scales=halves(blocks[..., :2]), super_block=32, sub_block=32)


def quantize_q8_0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Encode float32[..., 32 n] -> uint8[..., 34 n].

    The weights must be finite. The weight with the largest magnitude in each block becomes 127 or -127.
    """
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, BLOCK_WEIGHTS)
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    with np.errstate(over="ignore", invalid="ignore"):
        integers = half_away_from_zero(blocks * inverse(scale)).astype(np.int8)
    packed = np.concatenate([half_bytes(scale), integers.view(np.uint8)], axis=-1)
    return packed.reshape(*values.shape[:-1], values.shape[-1] // BLOCK_WEIGHTS * Q8_0_BYTES)


TYPES = (
    integer_type(
        "Q4_0",
        2,
        BLOCK_WEIGHTS,
        Q4_0_BYTES,
        unpack_q4_0,
        quantize_q4_0,
        half_fields=(0,),
        packed=PackedType((4,), zero=8),
    ),
    integer_type(
        "Q4_1",
        3,
        BLOCK_WEIGHTS,
        Q4_1_BYTES,
        unpack_q4_1,
        quantize_q4_1,
        half_fields=(0, 2),
        packed=PackedType((4,), mins=True),
    ),
    integer_type(
        "Q5_0",
        6,
        BLOCK_WEIGHTS,
        Q5_0_BYTES,
        unpack_q5_0,
        quantize_q5_0,
        half_fields=(0,),
        packed=PackedType((4, 1), zero=16),
    ),
    integer_type(
        "Q5_1",
        7,
        BLOCK_WEIGHTS,
        Q5_1_BYTES,
        unpack_q5_1,
        quantize_q5_1,
        half_fields=(0, 2),
        packed=PackedType((4, 1), mins=True),
    ),
    integer_type(
        "Q8_0", 8, BLOCK_WEIGHTS, Q8_0_BYTES, unpack_q8_0, quantize_q8_0, half_fields=(0,), packed=PackedType((8,))
    ),
)
