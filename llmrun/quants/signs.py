"""The signs of IQ2's and IQ3's weights: a bit each, 1 for a negative one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Where only 7 bits are stored for 8 weights, the number of negative ones is even: the eighth bit makes it so.
_EIGHT_BITS = np.array([seven | (seven.bit_count() % 2) << 7 for seven in range(128)], np.uint8)


def signs(bits: NDArray[np.uint8]) -> NDArray[np.int8]:
    """uint8[...] -> int8[..., 8] of 1 and -1; the lowest bit is the first weight's."""
    is_negative = (bits[..., None] >> np.arange(8, dtype=np.uint8)) & np.uint8(1)
    return np.int8(1) - np.int8(2) * is_negative.astype(np.int8)


def even_signs(seven_bits: NDArray[np.integer]) -> NDArray[np.int8]:
    """integers[...] of 0 to 127 -> int8[..., 8]."""
    return signs(_EIGHT_BITS[seven_bits])
