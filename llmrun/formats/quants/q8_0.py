"""Q8_0: blocks of 32 weights in 34 bytes, 8.5 bits per weight.

offset  bytes  field
0       2      scale    f16
2       32     values   int8

weight[i] = scale * values[i]
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmrun.formats.quants.fields import blocks_of, half_bytes, halves
from llmrun.formats.quants.packed import PackedType
from llmrun.formats.quants.rounding import half_away_from_zero, inverse
from llmrun.formats.quants.unpacked import Unpacked, joined
from llmrun.formats.quants.weight_type import integer_type

BLOCK_WEIGHTS = 32
BLOCK_BYTES = 34


def unpack(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 34 n] -> 32 n weights: values -128 to 127, with a scale per 32 weights."""
    blocks = blocks_of(raw, BLOCK_BYTES)
    values = blocks[..., 2:].view(np.int8)
    return joined(raw.ndim - 1, values, super_scales=halves(blocks[..., :2]), super_block=32, sub_block=32)


def quantize(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Encode float32[..., 32 n] -> uint8[..., 34 n].

    The weights must be finite. The weight with the largest magnitude in each block becomes 127 or -127.
    """
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, BLOCK_WEIGHTS)
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    with np.errstate(over="ignore", invalid="ignore"):
        integers = half_away_from_zero(blocks * inverse(scale)).astype(np.int8)
    packed = np.concatenate([half_bytes(scale), integers.view(np.uint8)], axis=-1)
    return packed.reshape(*values.shape[:-1], values.shape[-1] // BLOCK_WEIGHTS * BLOCK_BYTES)


TYPES = (
    integer_type("Q8_0", 8, BLOCK_WEIGHTS, BLOCK_BYTES, unpack, quantize, half_fields=(0,), packed=PackedType((8,))),
)
