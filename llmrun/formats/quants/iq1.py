"""IQ1_S and IQ1_M: groups of 8 weights, each a grid vector of -1, 0 and 1 shifted by plus or minus 1/8.

    IQ1_S, 50 bytes, 1.5625 bits per weight      IQ1_M, 56 bytes, 1.75 bits per weight

    offset  bytes  field                         offset  bytes  field
    0       2      scale  f16                    0       32     grid indices, low 8 bits
    2       32     grid indices, low 8 bits      32      16     nibbles
    34      16     groups  u16                   48      8      quarters  u16

    weight[i] = (scale * (2 * sub_scale[s] + 1)) * (grid[index[i / 8]][i % 8] + delta[d])

In IQ1_S, s = d = i / 32. In IQ1_M, s = i / 16 and d = i / 8. A delta is -1/8 if its bit is 1, and 1/8 otherwise.

In IQ1_S, each u16 of `groups` covers 32 weights and holds the high 3 bits of 4 grid indices, a 3-bit sub-scale, and the
delta bit. In IQ1_M, each nibble covers 8 weights and holds the high 3 bits of a grid index and the delta bit. Each u16
of `quarters` covers 64 weights and holds 4 sub-scales of 3 bits, then 4 bits of the f16 scale. The first quarter holds
the lowest bits of the scale. The low nibble of a byte comes first.

Scales have 11 significant bits, sub-scales have 4, and the sum of grid and delta has 4, so nothing is ever rounded.
The delta can therefore be part of the value instead of a minimum. An unpacked weight is
(scale / 8) * (2 sub_scale + 1) * (8 grid + 8 delta), where the last factor is an odd integer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmrun.formats.quants import grids
from llmrun.formats.quants.fields import SUPER_BLOCK, blocks_of, halves, sequence, words16
from llmrun.formats.quants.unpacked import Unpacked, joined
from llmrun.formats.quants.weight_type import integer_type, unsound_halves

IQ1_S_BYTES = 50
IQ1_M_BYTES = 56

_THREES = np.array([0, 3, 6, 9], np.uint16)  # bit offsets of the four 3-bit numbers in a group or quarter


def unpack_iq1_s(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 50 n] -> 256 n weights.

    Values are -9, -7, -1, 1, 7 or 9. Each group of 32 weights has an odd sub-scale of 1 to 15.
    """
    blocks = blocks_of(raw, IQ1_S_BYTES)
    groups = words16(blocks[..., 34:])
    high_bits = (groups[..., None] >> _THREES) & np.uint16(7)
    low_bits = blocks[..., 2:34].reshape(high_bits.shape)
    is_down = (groups >> np.uint16(15))[..., None]
    return joined(
        raw.ndim - 1,
        _eighths(low_bits, high_bits, is_down),
        super_scales=halves(blocks[..., :2], 1 / 8),
        sub_scales=_odd((groups >> np.uint16(12)) & np.uint16(7)),
        super_block=SUPER_BLOCK,
        sub_block=32,
    )


def unpack_iq1_m(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 56 n] -> 256 n weights.

    Values are -9, -7, -1, 1, 7 or 9. Each group of 16 weights has an odd sub-scale of 1 to 15.
    """
    blocks = blocks_of(raw, IQ1_M_BYTES)
    nibbles, quarters = sequence(blocks[..., 32:48], 4).astype(np.uint16), words16(blocks[..., 48:])
    parts = (quarters >> np.uint16(12)) << np.array([0, 4, 8, 12], np.uint16)
    scale = np.bitwise_or.reduce(parts, axis=-1, keepdims=True).astype("<u2")
    return joined(
        raw.ndim - 1,
        _eighths(blocks[..., :32], nibbles & np.uint16(7), nibbles >> np.uint16(3)),
        super_scales=halves(scale.view(np.uint8), 1 / 8),
        sub_scales=_odd((quarters[..., None] >> _THREES) & np.uint16(7)),
        super_block=SUPER_BLOCK,
        sub_block=16,
    )


def _eighths(
    low_bits: NDArray[np.uint8], high_bits: NDArray[np.uint16], is_down: NDArray[np.uint16]
) -> NDArray[np.int8]:
    """Return the grid vectors shifted by delta, times 8: [...] -> int8[..., 8]. The arguments broadcast together."""
    vectors = grids.iq1()[low_bits | (high_bits << np.uint16(8))]
    deltas = np.int8(1) - np.int8(2) * is_down.astype(np.int8)
    return np.int8(8) * vectors + deltas[..., None]


def _odd(sub_scales: NDArray[np.uint16]) -> NDArray[np.int16]:
    return 2 * sub_scales.astype(np.int16) + np.int16(1)


def _unsound_iq1_m(blocks: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return a mask of the blocks whose f16 scale, assembled from the highest 4 bits of four words, is not finite."""
    high = (words16(blocks[:, 48:56]) >> np.uint16(12)) << np.array([0, 4, 8, 12], np.uint16)
    return unsound_halves(np.bitwise_or.reduce(high, axis=1))


TYPES = (
    integer_type("IQ1_S", 19, SUPER_BLOCK, IQ1_S_BYTES, unpack_iq1_s, half_fields=(0,)),
    integer_type("IQ1_M", 29, SUPER_BLOCK, IQ1_M_BYTES, unpack_iq1_m, other_scales=_unsound_iq1_m),
)
