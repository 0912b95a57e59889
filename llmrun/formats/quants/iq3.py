"""IQ3_XXS and IQ3_S: groups of 4 weights, each a grid vector with 4 signs.

    IQ3_XXS, 98 bytes, 3.0625 bits per weight  IQ3_S, 110 bytes, 3.4375 bits per weight

    offset  bytes  field                       offset  bytes  field
    0       2      scale         f16           0       2      scale  f16
    2       64     grid indices                2       64     grid indices, low 8 bits
    66      32     8 groups      u32           66      8      grid indices, high bit
                                               74      32     signs
                                               106     4      sub-scales

    IQ3_XXS:  weight[i] = ((scale * (0.5 + sub_scale[i / 32])) * 0.5) * grid[index[i / 4]][i % 4] * sign[i]
    IQ3_S:    weight[i] = (scale * (1 + 2 * sub_scale[i / 32])) * grid[index[i / 4]][i % 4] * sign[i]

Scales have 11 significant bits, sub-scales have 5, and magnitudes have at most 5, so nothing is ever rounded. The
unpacked form of IQ3_XXS, (scale / 4) * (2 sub_scale + 1) * (magnitude * sign), is therefore equivalent.

In IQ3_XXS, each u32 of `groups` covers 32 weights and holds 4 sets of 7 sign bits, then a 4-bit sub-scale. A sign bit
is 1 for a negative weight. If only 7 sign bits are stored, the eighth has the value that makes the number of negative
weights even. IQ3_S stores all 8. Sign bits and 4-bit sub-scales are packed in order, starting with the lowest bits of
the first byte.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmrun.formats.quants import grids
from llmrun.formats.quants.fields import SUPER_BLOCK, blocks_of, halves, sequence, words32
from llmrun.formats.quants.grids import even_signs, signs
from llmrun.formats.quants.unpacked import Unpacked, joined
from llmrun.formats.quants.weight_type import integer_type

IQ3_XXS_BYTES = 98
IQ3_S_BYTES = 110


def unpack_iq3_xxs(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 98 n] -> 256 n weights.

    Values are -62 to 62, never 0. Each group of 32 weights has an odd sub-scale of 1 to 31.
    """
    blocks = blocks_of(raw, IQ3_XXS_BYTES)
    groups = words32(blocks[..., 66:])
    seven_bits = (groups[..., None] >> np.array([0, 7, 14, 21], np.uint32)) & np.uint32(127)
    sub_scales = 2 * (groups >> np.uint32(28)).astype(np.int16) + 1
    magnitudes = grids.iq3_xxs()[blocks[..., 2:66]]
    return joined(
        raw.ndim - 1,
        magnitudes * even_signs(seven_bits).reshape(magnitudes.shape),
        super_scales=halves(blocks[..., :2], 1 / 4),
        sub_scales=sub_scales,
        super_block=SUPER_BLOCK,
        sub_block=32,
    )


def unpack_iq3_s(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 110 n] -> 256 n weights.

    Values are odd, -15 to 15. Each group of 32 weights has an odd sub-scale of 1 to 31.
    """
    blocks = blocks_of(raw, IQ3_S_BYTES)
    indices = blocks[..., 2:66] | (sequence(blocks[..., 66:74], 1).astype(np.uint16) << np.uint16(8))
    magnitudes = grids.iq3_s()[indices]
    return joined(
        raw.ndim - 1,
        magnitudes * signs(blocks[..., 74:106]).reshape(magnitudes.shape),
        super_scales=halves(blocks[..., :2]),
        sub_scales=2 * sequence(blocks[..., 106:], 4).astype(np.int16) + 1,
        super_block=SUPER_BLOCK,
        sub_block=32,
    )


TYPES = (
    integer_type("IQ3_XXS", 18, SUPER_BLOCK, IQ3_XXS_BYTES, unpack_iq3_xxs, half_fields=(0,)),
    integer_type("IQ3_S", 21, SUPER_BLOCK, IQ3_S_BYTES, unpack_iq3_s, half_fields=(0,)),
)
