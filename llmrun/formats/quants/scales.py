"""Finds NaNs and infinities in stored weights.

Only the scales are checked, because every weight of a block is multiplied by them. A NaN or an infinity in a scale is
caused by a damaged file or a failed conversion, and makes every answer useless. The check makes one pass over the bytes
without computing any weights, so it does about a hundredth of the work of `dequantize`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmrun.formats.quants.fields import blocks_of
from llmrun.formats.quants.weight_type import WeightType, unsound_half_field


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
