"""Whether stored weights are numbers at all: of a block only the fields are looked at that every weight is multiplied
with. A NaN or an infinity there comes from a damaged file or a failed conversion, and spoils every answer.

One pass over the bytes, no weight is computed: a hundredth of the work of `dequantize`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmrun.quants.fields import blocks_of, words16, words32
from llmrun.quants.registry import WeightType

# Where a block has its f16 fields: scales, and minimums.
HALF_FIELDS: dict[str, tuple[int, ...]] = {
    "F16": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ1_S": (0,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}

_HALF_EXPONENT = np.uint16(0x7C00)  # all ones: NaN or infinity
_BFLOAT_EXPONENT = np.uint16(0x7F80)
_FLOAT_EXPONENT = np.uint32(0x7F800000)
_E8M0_NAN = np.uint8(255)
_UE4M3_NAN = np.uint8(127)  # whatever the eighth bit is


def unsound_blocks(type_: WeightType, raw: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """uint8[n block_bytes] -> bool[n]: which blocks hold a NaN or an infinity by which weights are scaled; of types
    without blocks, which weights are one. A type that holds integers has none."""
    blocks = blocks_of(raw, type_.block_bytes)
    found = np.zeros(len(blocks), np.bool_)
    for offset in HALF_FIELDS.get(type_.name, ()):
        found |= _all_set(words16(blocks[:, offset : offset + 2])[:, 0], _HALF_EXPONENT)
    match type_.name:
        case "F32":
            found |= _all_set(words32(blocks)[:, 0], _FLOAT_EXPONENT)
        case "BF16":
            found |= _all_set(words16(blocks)[:, 0], _BFLOAT_EXPONENT)
        case "IQ1_M":
            found |= _all_set(_spread_half(blocks), _HALF_EXPONENT)
        case "MXFP4":
            found |= blocks[:, 0] == _E8M0_NAN
        case "NVFP4":
            found |= ((blocks[:, :4] & _UE4M3_NAN) == _UE4M3_NAN).any(axis=1)
    return found


def _all_set(words: NDArray[np.unsignedinteger], bits: np.unsignedinteger) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (words & bits) == bits
    return found


def _spread_half(blocks: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """IQ1_M's scale, whose bits are the highest 4 of four words."""
    high = (words16(blocks[:, 48:56]) >> np.uint16(12)) << np.array([0, 4, 8, 12], np.uint16)
    scale: NDArray[np.uint16] = np.bitwise_or.reduce(high, axis=1)
    return scale
