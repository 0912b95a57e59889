"""TQ1_0 and TQ2_0: blocks of 256 weights of -1, 0 or 1, with one scale.

    TQ1_0, 54 bytes, 1.6875 bits per weight      TQ2_0, 66 bytes, 2.0625 bits per weight

    offset  bytes  field                         offset  bytes  field
    0       32     fives: weights 0 to 159       0       64     pairs
    32      16     fives: weights 160 to 239     64      2      scale  f16
    48      4      fours: weights 240 to 255
    52      2      scale  f16

    weight[i] = scale * (digit[i] - 1)           weight[i] = scale * (pair[i] - 1)

In TQ2_0, the pairs are stored in two runs of 32 bytes, each with 4 planes of 2 bits. A pair of 3 would mean the weight
2, but no encoder writes it.

In TQ1_0, each byte encodes five base-3 digits (0 to 2) as a fraction of 256, rounded up. Multiplying the byte by 3
shifts the first digit above the low 8 bits, which then encode the remaining digits in the same way. A field stores its
weights in this order: the first digits of all bytes, then the second digits, and so on. The fours do not use the last
digit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmrun.formats.quants.weight_type import (
    SUPER_BLOCK,
    Unpacked,
    blocks_of,
    half_away_from_zero,
    half_bytes,
    halves,
    integer_type,
    inverse,
    joined,
    planes,
)

TQ1_0_BYTES = 54
TQ2_0_BYTES = 66

# (bytes, digits used per byte) for each field of TQ1_0, in file order.
_FIELDS = ((32, 5), (16, 5), (4, 4))


def unpack_tq1_0(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 54 n] -> 256 n weights: values -1 to 1, with a scale per 256 weights."""
    blocks = blocks_of(raw, TQ1_0_BYTES)
    digits, start = [], 0
    for n_bytes, n_digits in _FIELDS:
        digits.append(_digits(blocks[..., start : start + n_bytes], n_digits))
        start += n_bytes
    values = np.concatenate(digits, axis=-1).astype(np.int8) - np.int8(1)
    return joined(raw.ndim - 1, values, super_scales=halves(blocks[..., 52:]), super_block=SUPER_BLOCK, sub_block=32)


def unpack_tq2_0(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 66 n] -> 256 n weights with a scale per 256 weights.

    Values are -1 to 1, or 2 for the unused bit pattern.
    """
    blocks = blocks_of(raw, TQ2_0_BYTES)
    runs = blocks[..., :64].reshape(*blocks.shape[:-1], 2, 32)
    values = planes(runs, 2).astype(np.int8) - np.int8(1)
    return joined(raw.ndim - 1, values, super_scales=halves(blocks[..., 64:]), super_block=SUPER_BLOCK, sub_block=32)


def quantize_tq1_0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Encode float32[..., 256 n] -> uint8[..., 54 n].

    The weights must be finite. The scale is the largest magnitude in the block.
    """
    scale, digits = _levels(values)
    fields, start = [], 0
    for n_bytes, n_digits in _FIELDS:
        count = n_bytes * n_digits
        by_place = digits[:, start : start + count].reshape(-1, n_digits, n_bytes).astype(np.uint16)
        number = sum(by_place[:, place] * np.uint16(3 ** (4 - place)) for place in range(n_digits))
        fields.append(((number * np.uint16(256) + np.uint16(242)) // np.uint16(243)).astype(np.uint8))
        start += count
    packed = np.concatenate([*fields, half_bytes(scale)], axis=-1)
    return packed.reshape(*values.shape[:-1], values.shape[-1] // SUPER_BLOCK * TQ1_0_BYTES)


def quantize_tq2_0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Encode float32[..., 256 n] -> uint8[..., 66 n].

    The weights must be finite. The scale is the largest magnitude in the block.
    """
    scale, digits = _levels(values)
    pairs = digits.reshape(-1, 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    packed = np.concatenate([np.bitwise_or.reduce(pairs, axis=-2).reshape(-1, 64), half_bytes(scale)], axis=-1)
    return packed.reshape(*values.shape[:-1], values.shape[-1] // SUPER_BLOCK * TQ2_0_BYTES)


def _digits(field: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """Extract the first digit of every byte, then the second digit, and so on: uint8[..., m] -> uint8[..., count m]."""
    powers = np.array([3**place for place in range(count)], np.uint8)
    rests = field[..., None, :] * powers[:, None]  # uint8 arithmetic is modulo 256, which drops the preceding digits
    digits = (rests.astype(np.uint16) * np.uint16(3) >> np.uint16(8)).astype(np.uint8)
    return digits.reshape(*field.shape[:-1], count * field.shape[-1])


def _levels(values: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Quantize the weights and return their scales (float32[n, 1]) and digits (uint8[n, 256])."""
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, SUPER_BLOCK)
    scale = np.abs(blocks).max(axis=-1, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore"):
        digits = half_away_from_zero(blocks * inverse(scale)).astype(np.int8) + np.int8(1)
    return scale, digits.astype(np.uint8)


TYPES = (
    integer_type("TQ1_0", 34, SUPER_BLOCK, TQ1_0_BYTES, unpack_tq1_0, quantize_tq1_0, half_fields=(52,)),
    integer_type("TQ2_0", 35, SUPER_BLOCK, TQ2_0_BYTES, unpack_tq2_0, quantize_tq2_0, half_fields=(64,)),
)
