"""IQ4_NL and IQ4_XS: 4-bit weights that index a table of 16 values. The values are closer together near zero.

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
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmrun.formats.quants.fields import SUPER_BLOCK, blocks_of, halves, planes, sequence
from llmrun.formats.quants.packed import PackedType, Scales
from llmrun.formats.quants.unpacked import Unpacked, joined
from llmrun.formats.quants.weight_type import integer_type

IQ4_NL_WEIGHTS = 32
IQ4_NL_BYTES = 18
IQ4_XS_BYTES = 136

_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
VALUES = np.array(_TABLE, np.int8)


def unpack_iq4_nl(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 18 n] -> 32 n weights with a scale per 32 weights. Values come from the table."""
    blocks = blocks_of(raw, IQ4_NL_BYTES)
    values = VALUES[planes(blocks[..., 2:], 4)]
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
        VALUES[planes(runs, 4)],
        super_scales=halves(blocks[..., 0:2]),
        sub_scales=(low_nibbles | (high_pairs << np.uint8(4))).astype(np.int16) - np.int16(32),
        super_block=SUPER_BLOCK,
        sub_block=32,
    )


TYPES = (
    integer_type(
        *("IQ4_NL", 20, IQ4_NL_WEIGHTS, IQ4_NL_BYTES, unpack_iq4_nl),
        half_fields=(0,),
        packed=PackedType((4,), table=_TABLE),
    ),
    integer_type(
        *("IQ4_XS", 23, SUPER_BLOCK, IQ4_XS_BYTES, unpack_iq4_xs),
        half_fields=(0,),
        packed=PackedType((4,), table=_TABLE, scales=Scales.TWO_LEVELS),
    ),
)
