"""IQ4_NL, IQ4_XS, MXFP4 and NVFP4: 4-bit weights that index a table of 16 values.

The values of IQ4_NL and IQ4_XS are closer together near zero.

    IQ4_NL, 18 bytes for 32 weights, 4.5 bits    IQ4_XS, 136 bytes for 256 weights, 4.25 bits

    offset  bytes  field                         offset  bytes  field
    0       2      scale    f16                  0       2      scale       f16
    2       16     nibbles                       2       2      high pairs
                                                 4       4      low nibbles
                                                 8       128    nibbles

    weight[i] = scale * value[nibble[i]]         weight[i] = (scale * (sub_scale[i / 32] - 32)) * value[nibble[i]]

Every 16 bytes of nibbles cover 32 weights: byte j holds weight j in its low half and weight j + 16 in its high half.
IQ4_XS has 8 sub-scales of 6 bits. Sub-scale s consists of low nibble s and high pair s, counted from the lowest bits of
the first byte.

The values of MXFP4 and NVFP4 are 4-bit floats (e2m1), and their scales are 8-bit floats.

    MXFP4, 17 bytes for 32 weights, 4.25 bits    NVFP4, 36 bytes for 64 weights, 4.5 bits

    offset  bytes  field                         offset  bytes  field
    0       1      scale  e8m0                   0       4      scales, each for 16 weights  ue4m3
    1       16     nibbles                       4       32     nibbles

    weight[i] = scale * value[nibble[i]]         weight[i] = scales[i / 16] * value[nibble[i]]

An e2m1 nibble encodes a sign and a magnitude of 0, 0.5, 1, 1.5, 2, 3, 4 or 6. This module doubles these values, which
makes them integers, and halves the scales. In every 16 bytes of MXFP4, byte j holds weight j in its low half and weight
j + 16 in its high half. In every 8 bytes of NVFP4, byte j holds weight j in its low half and weight j + 8 in its high
half.

e8m0 is a power of two: 2^(byte - 127). Half of that is 2^(byte - 128), which is subnormal for bytes 0 and 1. The
standard reserves byte 255 for NaN, but it is decoded like any other byte, as 2^128.

ue4m3 has a 4-bit exponent above a 3-bit fraction: 2^(exponent - 7) * (1 + fraction / 8), or 2^-9 * fraction if the
exponent is 0. Byte 127 means 0. The eighth bit is ignored, with one exception: byte 255 means 480, although byte 127
means 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmrun.formats.quants.weight_type import (
    SUPER_BLOCK,
    PackedType,
    Scales,
    Unpacked,
    blocks_of,
    halves,
    integer_type,
    joined,
    planes,
    sequence,
)

IQ4_NL_WEIGHTS = 32
IQ4_NL_BYTES = 18
IQ4_XS_BYTES = 136

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
IQ4_VALUES = np.array(_IQ4_VALUES, np.int8)


def unpack_iq4_nl(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 18 n] -> 32 n weights with a scale per 32 weights. Values come from the table."""
    blocks = blocks_of(raw, IQ4_NL_BYTES)
    values = IQ4_VALUES[planes(blocks[..., 2:], 4)]
    return joined(raw.ndim - 1, values, super_scales=halves(blocks[..., :2]), super_block=32, sub_block=32)


def unpack_iq4_xs(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 136 n] -> 256 n weights.

    Values come from the table. Each group of 32 weights has a sub-scale of -32 to 31.
    """
    blocks = blocks_of(raw, IQ4_XS_BYTES)
    high_pairs, low_nibbles = sequence(blocks[..., 2:4], 2), sequence(blocks[..., 4:8], 4)
    runs = blocks[..., 8:].reshape(*blocks.shape[:-1], 8, 16)
    return joined(
        raw.ndim - 1,
        IQ4_VALUES[planes(runs, 4)],
        super_scales=halves(blocks[..., 0:2]),
        sub_scales=(low_nibbles | (high_pairs << np.uint8(4))).astype(np.int16) - np.int16(32),
        super_block=SUPER_BLOCK,
        sub_block=32,
    )


MXFP4_WEIGHTS = 32
MXFP4_BYTES = 17
NVFP4_WEIGHTS = 64
NVFP4_BYTES = 36

_E2M1_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled values
E2M1_VALUES = np.array(_E2M1_VALUES, np.int8)


def unpack_mxfp4(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 17 n] -> 32 n weights with a scale per 32 weights. Values come from the table."""
    blocks = blocks_of(raw, MXFP4_BYTES)
    values = E2M1_VALUES[planes(blocks[..., 1:], 4)]
    return joined(raw.ndim - 1, values, super_scales=_half_e8m0(blocks[..., :1]), super_block=32, sub_block=32)


def unpack_nvfp4(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 36 n] -> 64 n weights with a scale per 16 weights. Values come from the table."""
    blocks = blocks_of(raw, NVFP4_BYTES)
    runs = blocks[..., 4:].reshape(*blocks.shape[:-1], 4, 8)
    return joined(
        raw.ndim - 1,
        E2M1_VALUES[planes(runs, 4)],
        super_scales=_half_ue4m3(blocks[..., :4]),
        super_block=16,
        sub_block=16,
    )


def quantize_mxfp4(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Encode float32[..., 32 n] -> uint8[..., 17 n]. The weights must be finite.

    The scale is chosen so that the largest magnitude in a block is 4 to 8 times the scale before rounding. Each weight
    is rounded to the nearest value; ties go to the lower nibble. Blocks whose largest magnitude is below 2^-125 get the
    smallest scale.
    """
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, MXFP4_WEIGHTS)
    widest = np.abs(blocks).max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        exponents = np.floor(np.log2(widest)) - np.float32(2) + np.float32(127)
    scales = exponents.clip(0, 255).astype(np.uint8)
    levels = _half_e8m0(scales)[..., None] * E2M1_VALUES.astype(np.float32)
    nibbles = np.abs(levels - blocks[..., None]).argmin(axis=-1).astype(np.uint8)
    packed = np.concatenate([scales, nibbles[:, :16] | (nibbles[:, 16:] << np.uint8(4))], axis=-1)
    return packed.reshape(*values.shape[:-1], values.shape[-1] // MXFP4_WEIGHTS * MXFP4_BYTES)


def _half_e8m0(stored: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Compute 2^(stored - 128). The result is exact."""
    return np.ldexp(np.float32(1), stored.astype(np.int32) - 128)


def _half_ue4m3(stored: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Decode ue4m3 numbers and halve them. The result is exact."""
    exponent, fraction = (stored.astype(np.int32) >> 3) & 15, stored.astype(np.int32) & 7
    is_normal = exponent > 0
    significand = np.where(is_normal, 8 + fraction, fraction).astype(np.float32)
    # 11 is the sum of the bias (7), the fraction bits (3) and 1 for halving the result.
    numbers = np.ldexp(significand, np.where(is_normal, exponent, 1) - 11)
    return np.where(stored == 127, np.float32(0), numbers)


def _unsound_e8m0(blocks: NDArray[np.uint8]) -> NDArray[np.bool_]:
    unsound: NDArray[np.bool_] = blocks[:, 0] == 255
    return unsound


def _unsound_ue4m3(blocks: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return a mask of the blocks whose scales decode to NaN, ignoring the eighth bit of each scale."""
    unsound: NDArray[np.bool_] = ((blocks[:, :4] & np.uint8(127)) == 127).any(axis=1)
    return unsound


TYPES = (
    integer_type(
        "IQ4_NL",
        20,
        IQ4_NL_WEIGHTS,
        IQ4_NL_BYTES,
        unpack_iq4_nl,
        half_fields=(0,),
        packed=PackedType((4,), table=_IQ4_VALUES),
    ),
    integer_type(
        "IQ4_XS",
        23,
        SUPER_BLOCK,
        IQ4_XS_BYTES,
        unpack_iq4_xs,
        half_fields=(0,),
        packed=PackedType((4,), table=_IQ4_VALUES, scales=Scales.TWO_LEVELS),
    ),
    integer_type(
        "MXFP4",
        39,
        MXFP4_WEIGHTS,
        MXFP4_BYTES,
        unpack_mxfp4,
        quantize_mxfp4,
        other_scales=_unsound_e8m0,
        packed=PackedType((4,), table=_E2M1_VALUES, scales=Scales.E8M0),
    ),
    integer_type("NVFP4", 40, NVFP4_WEIGHTS, NVFP4_BYTES, unpack_nvfp4, other_scales=_unsound_ue4m3),
)
