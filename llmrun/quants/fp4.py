"""MXFP4 and NVFP4: weights that are floats of 4 bits (e2m1), with scales that are floats of 8 bits.

    MXFP4, 17 bytes for 32 weights, 4.25 bits    NVFP4, 36 bytes for 64 weights, 4.5 bits

    offset  bytes  field                         offset  bytes  field
    0       1      scale  e8m0                   0       4      scales, each for 16 weights  ue4m3
    1       16     nibbles                       4       32     nibbles

    weight[i] = scale * value[nibble[i]]         weight[i] = scales[i / 16] * value[nibble[i]]

A nibble is a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6. The values here are twice that, integers, and the scales half
of what is stored. Of each 16 bytes of MXFP4 (8 of NVFP4), byte j holds weight j in its low half and weight j + 16
(j + 8) in its high half.

e8m0 is a power of two: 2^(byte - 127), so half of it is 2^(byte - 128), a subnormal for 0 and 1. 255, which the
standard has for NaN, is read as 2^128 like any other.
ue4m3 is 4 bits of exponent above 3 of fraction: 2^(exponent - 7) * (1 + fraction / 8), or 2^-9 * fraction where the
exponent is 0. 127 is 0. The eighth bit is not looked at, but 255 is not 127: it is 480.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmrun.quants.fields import blocks_of, planes
from llmrun.quants.packed import PackedType, Scales
from llmrun.quants.unpacked import Unpacked, joined
from llmrun.quants.weight_type import integer_type

MXFP4_WEIGHTS = 32
MXFP4_BYTES = 17
NVFP4_WEIGHTS = 64
NVFP4_BYTES = 36

_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the value
VALUES = np.array(_TABLE, np.int8)


def unpack_mxfp4(raw: NDArray[np.uint8]) -> Unpacked:
    """uint8[..., 17 n] -> 32 n weights: values of the table, a scale for 32."""
    blocks = blocks_of(raw, MXFP4_BYTES)
    values = VALUES[planes(blocks[..., 1:], 4)]
    return joined(raw.ndim - 1, values, super_scales=_half_e8m0(blocks[..., :1]), super_block=32, sub_block=32)


def unpack_nvfp4(raw: NDArray[np.uint8]) -> Unpacked:
    """uint8[..., 36 n] -> 64 n weights: values of the table, a scale for 16."""
    blocks = blocks_of(raw, NVFP4_BYTES)
    runs = blocks[..., 4:].reshape(*blocks.shape[:-1], 4, 8)
    return joined(
        raw.ndim - 1,
        VALUES[planes(runs, 4)],
        super_scales=_half_ue4m3(blocks[..., :4]),
        super_block=16,
        sub_block=16,
    )


def quantize_mxfp4(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """float32[..., 32 n] -> uint8[..., 17 n]. Finite weights; the widest of a block becomes 4 to 6 times the scale.

    Each weight takes the nearest value; of two equally near, the one of the lower nibble. A block whose widest weight
    is below 2^-125 has the least scale there is.
    """
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, MXFP4_WEIGHTS)
    widest = np.abs(blocks).max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        exponents = np.floor(np.log2(widest)) - np.float32(2) + np.float32(127)
    scales = exponents.clip(0, 255).astype(np.uint8)
    levels = _half_e8m0(scales)[..., None] * VALUES.astype(np.float32)
    nibbles = np.abs(levels - blocks[..., None]).argmin(axis=-1).astype(np.uint8)
    packed = np.concatenate([scales, nibbles[:, :16] | (nibbles[:, 16:] << np.uint8(4))], axis=-1)
    return packed.reshape(*values.shape[:-1], values.shape[-1] // MXFP4_WEIGHTS * MXFP4_BYTES)


def _half_e8m0(stored: NDArray[np.uint8]) -> NDArray[np.float32]:
    """2^(stored - 128), exact."""
    return np.ldexp(np.float32(1), stored.astype(np.int32) - 128)


def _half_ue4m3(stored: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Half of what is stored, exact."""
    exponent, fraction = (stored.astype(np.int32) >> 3) & 15, stored.astype(np.int32) & 7
    is_normal = exponent > 0
    significand = np.where(is_normal, 8 + fraction, fraction).astype(np.float32)
    # A fraction has 3 bits, and half of the scale is wanted: 3 + 1 more than the bias of 7.
    numbers = np.ldexp(significand, np.where(is_normal, exponent, 1) - 11)
    return np.where(stored == 127, np.float32(0), numbers)


def _unsound_e8m0(blocks: NDArray[np.uint8]) -> NDArray[np.bool_]:
    unsound: NDArray[np.bool_] = blocks[:, 0] == 255
    return unsound


def _unsound_ue4m3(blocks: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """The eighth bit of a scale does not count."""
    unsound: NDArray[np.bool_] = ((blocks[:, :4] & np.uint8(127)) == 127).any(axis=1)
    return unsound


TYPES = (
    integer_type(
        *("MXFP4", 39, MXFP4_WEIGHTS, MXFP4_BYTES, unpack_mxfp4, quantize_mxfp4),
        other_scales=_unsound_e8m0,
        packed=PackedType((4,), table=_TABLE, scales=Scales.E8M0),
    ),
    integer_type("NVFP4", 40, NVFP4_WEIGHTS, NVFP4_BYTES, unpack_nvfp4, other_scales=_unsound_ue4m3),
)
