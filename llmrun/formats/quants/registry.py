"""All weight types that a GGUF file may contain, by ID and by name. Each type is declared in the module of its format.

The IDs and sizes match ggml's `enum ggml_type` and its block structs. The missing IDs (4, 5, 31 to 33, and 36 to 38)
belong to types that ggml has removed.

`unsound_blocks` finds NaNs and infinities in stored weights. It checks only the scales, because every weight of a block
is multiplied by them. A NaN or an infinity in a scale is caused by a damaged file or a failed conversion, and makes
every answer useless. The check makes one pass over the bytes without computing any weights, so it does about a
hundredth of the work of `dequantize`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmrun.formats.quants import floats, grid_quants, k_quants, legacy_quants, table_quants, ternary
from llmrun.formats.quants.weight_type import WeightType, blocks_of, unsound_half_field

_FORMATS = (floats, legacy_quants, k_quants, grid_quants, table_quants, ternary)

# Types that the GGUF format defines but llmrun cannot read.
_KNOWN = (
    # gguf-py lists 40 bytes, but ggml's struct has two f16 and 32 int8, which is 36. No file contains this type.
    WeightType("Q8_1", 9, 32, 36),
    WeightType("Q8_K", 15, 256, 292),  # ggml uses this type for activations only, so no file contains it
    WeightType("I8", 24, 1, 1),
    WeightType("I16", 25, 1, 2),
    WeightType("I32", 26, 1, 4),
    WeightType("I64", 27, 1, 8),
    WeightType("F64", 28, 1, 8),
    WeightType("Q1_0", 41, 128, 18),
    WeightType("Q2_0", 42, 64, 18),
)

ALL_TYPES = (*(type_ for format_ in _FORMATS for type_ in format_.TYPES), *_KNOWN)
BY_ID: dict[int, WeightType] = {type_.ggml_id: type_ for type_ in sorted(ALL_TYPES, key=lambda type_: type_.ggml_id)}
BY_NAME: dict[str, WeightType] = {type_.name: type_ for type_ in BY_ID.values()}


def unsound_blocks(type_: WeightType, raw: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Find the blocks with a NaN or an infinity in their scales: uint8[n * block_bytes] -> bool[n].

    In float types, each weight is a block. Types without scales never have such blocks.
    """
    blocks = blocks_of(raw, type_.block_bytes)
    found = np.zeros(len(blocks), np.bool_)
    for offset in type_.half_fields:
        found |= unsound_half_field(blocks, offset)
    if type_.other_scales is not None:
        found |= type_.other_scales(blocks)
    return found
