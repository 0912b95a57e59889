"""Q4_0 and Q4_1: blocks of 32 weights of 4 bits, with a scale. Q4_1 also has a minimum.

    Q4_0, 18 bytes, 4.5 bits per weight      Q4_1, 20 bytes, 5 bits per weight

    offset  bytes  field                     offset  bytes  field
    0       2      scale    f16              0       2      scale    f16
    2       16     nibbles                   2       2      minimum  f16
                                             4       16     nibbles

    weight[i] = scale * (nibble[i] - 8)      weight[i] = scale * nibble[i] + minimum

Byte j of the nibbles holds weight j in its low half and weight j + 16 in its high half.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmrun.formats.quants.fields import blocks_of, half_bytes, halves, planes
from llmrun.formats.quants.packed import PackedType
from llmrun.formats.quants.rounding import above_the_least, around_zero
from llmrun.formats.quants.unpacked import Unpacked, joined
from llmrun.formats.quants.weight_type import integer_type

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
    packed = np.concatenate([half_bytes(scale), half_bytes(minimum), _pack(levels)], axis=-1)
    return packed.reshape(*values.shape[:-1], values.shape[-1] // BLOCK_WEIGHTS * Q4_1_BYTES)


def pack_q4_0(scale: NDArray[np.float32], levels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack scales float32[n, 1], rounded to f16, and levels uint8[n, 32] from 0 to 15 -> uint8[n, 18]."""
    return np.concatenate([half_bytes(scale), _pack(levels)], axis=-1)


def _pack(nibbles: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return nibbles[:, :16] | (nibbles[:, 16:] << np.uint8(4))


TYPES = (
    integer_type(
        *("Q4_0", 2, BLOCK_WEIGHTS, Q4_0_BYTES, unpack_q4_0, quantize_q4_0),
        half_fields=(0,),
        packed=PackedType((4,), zero=8),
    ),
    integer_type(
        *("Q4_1", 3, BLOCK_WEIGHTS, Q4_1_BYTES, unpack_q4_1, quantize_q4_1),
        half_fields=(0, 2),
        packed=PackedType((4,), mins=True),
    ),
)
