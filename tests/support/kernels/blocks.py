"""Blocks of every readable weight type, with random bytes and extreme scales."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from llmrun.formats.quants.registry import BY_NAME
from llmrun.formats.quants.weight_type import WeightType

READABLE = sorted(name for name, type_ in BY_NAME.items() if type_.dequantize is not None)
WRITABLE = sorted(name for name, type_ in BY_NAME.items() if type_.quantize is not None)
INTEGERS = sorted(name for name, type_ in BY_NAME.items() if type_.unpack is not None)

# Offsets of the f16 fields in a block. IQ1_M spreads its field over four words; MXFP4 and NVFP4 have none.
HALF_FIELDS: dict[str, tuple[int, ...]] = {
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

# Zero, the smallest and largest subnormal, the smallest normal, one, the largest finite value, infinity and NaNs, with
# both signs.
_EXTREMES = np.array([0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7FFF], np.uint16)
EXTREME_HALVES: NDArray[np.uint16] = np.concatenate([_EXTREMES, _EXTREMES | np.uint16(0x8000)])


def random_rows(type_: WeightType, rows: int, blocks: int, seed: int) -> NDArray[np.uint8]:
    """Return random blocks, uint8[rows, blocks * block bytes]."""
    return np.random.default_rng(seed).integers(0, 256, (rows, blocks * type_.block_bytes), np.uint8)


def put_halves(type_: WeightType, raw: NDArray[np.uint8], halves: NDArray[np.uint16]) -> NDArray[np.uint8]:
    """Return a copy of the blocks with their f16 fields replaced by halves, uint16[blocks, fields]."""
    blocks = raw.reshape(-1, type_.block_bytes).copy()
    for column, offset in enumerate(HALF_FIELDS.get(type_.name, ())):
        blocks[:, offset : offset + 2] = np.ascontiguousarray(halves[:, column, None], "<u2").view(np.uint8)
    return blocks.reshape(raw.shape)


def put_spread_half(raw: NDArray[np.uint8], halves: NDArray[np.uint16]) -> NDArray[np.uint8]:
    """Return IQ1_M blocks with their scales replaced by halves, uint16[blocks].

    The scale's bits are stored in the top 4 bits of four words.
    """
    blocks = raw.reshape(-1, BY_NAME["IQ1_M"].block_bytes).copy()
    for quarter in range(4):
        high = (halves >> (4 * quarter) & 15).astype(np.uint8)
        blocks[:, 49 + 2 * quarter] = blocks[:, 49 + 2 * quarter] & 15 | high << 4
    return blocks.reshape(raw.shape)


@st.composite
def raw_blocks(draw: st.DrawFn, name: str) -> NDArray[np.uint8]:
    """Draw uint8[rows, blocks * block bytes] of random bytes. Half of the arrays have extreme f16 fields."""
    type_ = BY_NAME[name]
    rows, blocks = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    raw = draw(hnp.arrays(np.uint8, (rows, blocks * type_.block_bytes)))
    if draw(st.booleans()):
        extremes = st.sampled_from([int(half) for half in EXTREME_HALVES])
        return put_halves(type_, raw, draw(hnp.arrays(np.uint16, (rows * blocks, 2), elements=extremes)))
    return raw


def assert_same_bits(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> None:
    """Assert equal bits. NaNs only have to match NaNs, because their sign depends on the order of an addition."""
    nan = np.isnan(theirs)
    np.testing.assert_array_equal(np.isnan(ours), nan)
    np.testing.assert_array_equal(ours[~nan].view(np.uint32), theirs[~nan].view(np.uint32))
