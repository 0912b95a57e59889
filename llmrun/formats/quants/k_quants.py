"""Q2_K to Q6_K: blocks of 256 weights with an integer sub-scale per 16 or 32 weights and an f16 scale per block.

    Q2_K, 84 bytes, 2.625 bits per weight      Q3_K, 110 bytes, 3.4375 bits per weight

    offset  bytes  field                       offset  bytes  field
    0       16     sub-scales, sub-minimums    0       32     high bits
    16      64     pairs                       32      64     pairs
    80      2      scale    f16                96      12     sub-scales
    82      2      minimum  f16                108     2      scale  f16

    Q4_K, 144 bytes, 4.5 bits per weight       Q5_K, 176 bytes, 5.5 bits per weight

    offset  bytes  field                       offset  bytes  field
    0       2      scale    f16                0       2      scale    f16
    2       2      minimum  f16                2       2      minimum  f16
    4       12     sub-scales, sub-minimums    4       12     sub-scales, sub-minimums
    16      128    nibbles                     16      32     high bits
                                               48      128    nibbles

    Q6_K, 210 bytes, 6.5625 bits per weight

    offset  bytes  field
    0       128    nibbles
    128     64     pairs
    192     16     sub-scales  int8
    208     2      scale       f16

Q2_K, Q4_K, Q5_K:  weight[i] = (scale * sub_scale[s]) * level[i] - minimum * sub_minimum[s]
Q3_K, Q6_K:        weight[i] = (scale * sub_scale[s]) * value[i]

s is i / 16 in Q2_K, Q3_K and Q6_K, and i / 32 in Q4_K and Q5_K. The bits of the 256 levels are stored in planes. A
plane consists of the bits at the same position in consecutive bytes, and holds consecutive weights.

high bits      bit p of byte j belongs to weight 32 p + j
pairs          two runs of 32 bytes, each with 4 planes of 2 bits that hold 128 weights
nibbles        runs of 32 bytes, each with 2 planes of 4 bits that hold 64 weights; in Q6_K, 64 bytes hold 128 weights

A Q3_K value is the pair if the high bit is 1, and the pair minus 4 otherwise. A Q6_K value consists of the nibble (its
low bits) and the pair (its high bits), minus 32.

In Q2_K, byte s holds sub-scale s in its low half and sub-minimum s in its high half. Q3_K stores 6-bit sub-scales with
an offset of 32. Their low 4 bits are in two planes of 8 bytes and their high 2 bits in four planes of 4 bytes. In Q4_K
and Q5_K, the 12 bytes consist of three runs of 4 bytes:

    run 0, byte k   sub-scale k, 6 bits                   and the high 2 bits of sub-scale k + 4
    run 1, byte k   sub-minimum k, 6 bits                 and the high 2 bits of sub-minimum k + 4
    run 2, byte k   the low 4 bits of sub-scale k + 4     and the low 4 bits of sub-minimum k + 4
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
)

Q2_K_BYTES = 84
Q3_K_BYTES = 110
Q4_K_BYTES = 144
Q5_K_BYTES = 176
Q6_K_BYTES = 210


def unpack_q2_k(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 84 n] -> 256 n weights.

    Values are 0 to 3. Each group of 16 weights has a sub-scale and a sub-minimum of 0 to 15.
    """
    blocks = blocks_of(raw, Q2_K_BYTES)
    sub_scales, sub_minimums = _split(planes(blocks[..., :16], 4))
    return joined(
        raw.ndim - 1,
        _runs(blocks[..., 16:80], 32, bits=2).astype(np.int8),
        super_scales=halves(blocks[..., 80:82]),
        sub_scales=sub_scales,
        super_minimums=halves(blocks[..., 82:84]),
        sub_minimums=sub_minimums,
        super_block=SUPER_BLOCK,
        sub_block=16,
    )


def unpack_q3_k(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 110 n] -> 256 n weights: values -4 to 3, with a sub-scale of -32 to 31 per 16 weights."""
    blocks = blocks_of(raw, Q3_K_BYTES)
    high_bits = _runs(blocks[..., :32], 32, bits=1)
    levels = _runs(blocks[..., 32:96], 32, bits=2) | (high_bits << np.uint8(2))
    low_scales, high_scales = _runs(blocks[..., 96:104], 8, bits=4), _runs(blocks[..., 104:108], 4, bits=2)
    sub_scales = (low_scales | (high_scales << np.uint8(4))).astype(np.int16) - np.int16(32)
    return joined(
        raw.ndim - 1,
        levels.astype(np.int8) - np.int8(4),
        super_scales=halves(blocks[..., 108:110]),
        sub_scales=sub_scales,
        super_block=SUPER_BLOCK,
        sub_block=16,
    )


def unpack_q4_k(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 144 n] -> 256 n weights.

    Values are 0 to 15. Each group of 32 weights has a sub-scale and a sub-minimum of 0 to 63.
    """
    blocks = blocks_of(raw, Q4_K_BYTES)
    return _with_minimums(raw.ndim - 1, blocks, _runs(blocks[..., 16:144], 32, bits=4))


def unpack_q5_k(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 176 n] -> 256 n weights.

    Values are 0 to 31. Each group of 32 weights has a sub-scale and a sub-minimum of 0 to 63.
    """
    blocks = blocks_of(raw, Q5_K_BYTES)
    high_bits = _runs(blocks[..., 16:48], 32, bits=1)
    levels = _runs(blocks[..., 48:176], 32, bits=4) | (high_bits << np.uint8(4))
    return _with_minimums(raw.ndim - 1, blocks, levels)


def unpack_q6_k(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 210 n] -> 256 n weights: values -32 to 31, with a sub-scale of -128 to 127 per 16 weights."""
    blocks = blocks_of(raw, Q6_K_BYTES)
    high_pairs = _runs(blocks[..., 128:192], 32, bits=2)
    levels = _runs(blocks[..., :128], 64, bits=4) | (high_pairs << np.uint8(4))
    return joined(
        raw.ndim - 1,
        levels.astype(np.int8) - np.int8(32),
        super_scales=halves(blocks[..., 208:210]),
        sub_scales=blocks[..., 192:208].view(np.int8),
        super_block=SUPER_BLOCK,
        sub_block=16,
    )


def _with_minimums(n_rows_axes: int, blocks: NDArray[np.uint8], levels: NDArray[np.uint8]) -> Unpacked:
    """Decode the 16-byte header that Q4_K and Q5_K share, and combine it with the levels."""
    first, second, third = (blocks[..., start : start + 4] for start in (4, 8, 12))
    low_scales, low_minimums = _split(planes(third, 4))
    return joined(
        n_rows_axes,
        levels.astype(np.int8),
        super_scales=halves(blocks[..., 0:2]),
        sub_scales=_six_bits(first, low_scales),
        super_minimums=halves(blocks[..., 2:4]),
        sub_minimums=_six_bits(second, low_minimums),
        super_block=SUPER_BLOCK,
        sub_block=32,
    )


def _six_bits(run: NDArray[np.uint8], low_bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Assemble eight 6-bit numbers from two uint8[..., 4] arrays -> uint8[..., 8].

    The first four are the low 6 bits of `run`. The others combine `low_bits` with the high 2 bits of `run`.
    """
    return np.concatenate([run & np.uint8(63), low_bits | (run >> np.uint8(6) << np.uint8(4))], axis=-1)


def _runs(field: NDArray[np.uint8], run_bytes: int, *, bits: int) -> NDArray[np.uint8]:
    """Extract the planes of consecutive runs of bytes: uint8[..., m] -> uint8[..., 8 m / bits]."""
    lead, count = field.shape[:-1], field.shape[-1]
    runs = field.reshape(*lead, count // run_bytes, run_bytes)
    return planes(runs, bits).reshape(*lead, count * (8 // bits))


def _split(pair: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Split uint8[..., 2, m] into two uint8[..., m] arrays."""
    return pair[..., 0, :], pair[..., 1, :]


TYPES = (
    integer_type(
        "Q2_K",
        10,
        SUPER_BLOCK,
        Q2_K_BYTES,
        unpack_q2_k,
        half_fields=(80, 82),
        packed=PackedType((2,), scales=Scales.TWO_LEVELS, mins=True, sub_columns=16),
    ),
    integer_type(
        "Q3_K",
        11,
        SUPER_BLOCK,
        Q3_K_BYTES,
        unpack_q3_k,
        half_fields=(108,),
        packed=PackedType((2, 1), zero=4, scales=Scales.TWO_LEVELS, sub_columns=16),
    ),
    integer_type(
        "Q4_K",
        12,
        SUPER_BLOCK,
        Q4_K_BYTES,
        unpack_q4_k,
        half_fields=(0, 2),
        packed=PackedType((4,), scales=Scales.TWO_LEVELS, mins=True),
    ),
    integer_type(
        "Q5_K",
        13,
        SUPER_BLOCK,
        Q5_K_BYTES,
        unpack_q5_k,
        half_fields=(0, 2),
        packed=PackedType((4, 1), scales=Scales.TWO_LEVELS, mins=True),
    ),
    integer_type(
        "Q6_K",
        14,
        SUPER_BLOCK,
        Q6_K_BYTES,
        unpack_q6_k,
        half_fields=(208,),
        packed=PackedType((4, 2), zero=32, scales=Scales.TWO_LEVELS, sub_columns=16),
    ),
)
