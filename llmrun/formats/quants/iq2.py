"""IQ2_XXS, IQ2_XS and IQ2_S: groups of 8 weights, each a grid vector with 8 signs.

    IQ2_XXS, 66 bytes, 2.0625 bits per weight  IQ2_XS, 74 bytes, 2.3125 bits per weight

    offset  bytes  field                       offset  bytes  field
    0       2      scale     f16               0       2      scale       f16
    2       64     8 groups                    2       64     eights      u16
                                               66      8      sub-scales

    IQ2_S, 82 bytes, 2.5625 bits per weight

    offset  bytes  field
    0       2      scale       f16
    2       32     grid indices, low 8 bits
    34      32     signs
    66      8      grid indices, high 2 bits
    74      8      sub-scales

weight[i] = ((scale * (0.5 + sub_scale[s])) * 0.25) * grid[index[i / 8]][i % 8] * sign[i]

s is i / 32 in IQ2_XXS and i / 16 in the others. Scales have 11 significant bits, sub-scales 5 and magnitudes 6, so
nothing is ever rounded. The unpacked form (scale / 8) * (2 sub_scale + 1) * (magnitude * sign) is therefore equivalent.

In IQ2_XXS, a group of 32 weights is stored as two u32. The first holds 4 grid indices of one byte each. The second
holds 4 sets of 7 sign bits, then a 4-bit sub-scale. In IQ2_XS, each u16 of `eights` covers 8 weights and holds a 9-bit
grid index, then 7 sign bits. A sign bit is 1 for a negative weight. If only 7 sign bits are stored, the eighth has the
value that makes the number of negative weights even. IQ2_S stores all 8. Sign bits and 4-bit sub-scales are packed in
order, starting with the lowest bits of the first byte.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmrun.formats.quants import grids
from llmrun.formats.quants.fields import SUPER_BLOCK, blocks_of, halves, sequence, words16, words32
from llmrun.formats.quants.grids import even_signs, signs
from llmrun.formats.quants.unpacked import Unpacked, joined
from llmrun.formats.quants.weight_type import integer_type

IQ2_XXS_BYTES = 66
IQ2_XS_BYTES = 74
IQ2_S_BYTES = 82


def unpack_iq2_xxs(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 66 n] -> 256 n weights.

    Values are -43 to 43, never 0. Each group of 32 weights has an odd sub-scale of 1 to 31.
    """
    blocks = blocks_of(raw, IQ2_XXS_BYTES)
    groups = blocks[..., 2:].reshape(*blocks.shape[:-1], 8, 8)
    indices, rest = groups[..., :4], words32(groups[..., 4:])
    seven_bits = (rest >> np.array([0, 7, 14, 21], np.uint32)) & np.uint32(127)
    values = grids.iq2_xxs()[indices] * even_signs(seven_bits)
    return _unpacked(raw.ndim - 1, values, blocks, rest >> np.uint32(28), sub_block=32)


def unpack_iq2_xs(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 74 n] -> 256 n weights.

    Values are -43 to 43, never 0. Each group of 16 weights has an odd sub-scale of 1 to 31.
    """
    blocks = blocks_of(raw, IQ2_XS_BYTES)
    eights = words16(blocks[..., 2:66])
    values = grids.iq2_xs()[eights & np.uint16(511)] * even_signs(eights >> np.uint16(9))
    return _unpacked(raw.ndim - 1, values, blocks, sequence(blocks[..., 66:], 4), sub_block=16)


def unpack_iq2_s(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 82 n] -> 256 n weights.

    Values are -43 to 43, never 0. Each group of 16 weights has an odd sub-scale of 1 to 31.
    """
    blocks = blocks_of(raw, IQ2_S_BYTES)
    indices = blocks[..., 2:34] | (sequence(blocks[..., 66:74], 2).astype(np.uint16) << np.uint16(8))
    values = grids.iq2_s()[indices] * signs(blocks[..., 34:66])
    return _unpacked(raw.ndim - 1, values, blocks, sequence(blocks[..., 74:], 4), sub_block=16)


def _unpacked(
    n_rows_axes: int,
    values: NDArray[np.int8],
    blocks: NDArray[np.uint8],
    sub_scales: NDArray[np.unsignedinteger],
    *,
    sub_block: int,
) -> Unpacked:
    return joined(
        n_rows_axes,
        values,
        super_scales=halves(blocks[..., :2], 1 / 8),
        sub_scales=2 * sub_scales.astype(np.int16) + 1,
        super_block=SUPER_BLOCK,
        sub_block=sub_block,
    )


TYPES = (
    integer_type("IQ2_XXS", 16, SUPER_BLOCK, IQ2_XXS_BYTES, unpack_iq2_xxs, half_fields=(0,)),
    integer_type("IQ2_XS", 17, SUPER_BLOCK, IQ2_XS_BYTES, unpack_iq2_xs, half_fields=(0,)),
    integer_type("IQ2_S", 22, SUPER_BLOCK, IQ2_S_BYTES, unpack_iq2_s, half_fields=(0,)),
)
