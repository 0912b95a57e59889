"""The packed forms of all weight types by name, as kernels and lowering look them up.

A type says in its own file of quants/ how the kernels hold it. Integer types that have no packed form of their own are
"wide": each weight becomes a byte, which is exact but larger in memory than in the file.
"""

from __future__ import annotations

from llmrun.quants.packed import PackedType, Scales
from llmrun.quants.registry import BY_ID

WIDE = "wide"
WIDE_BYTES = 40  # of 32 columns: two float32 scales, and an int8 each

_READABLE = [type_ for type_ in BY_ID.values() if type_.dequantize is not None]

PACKED_TYPES = {type_.name.lower(): type_.packed for type_ in _READABLE if type_.packed is not None}
PACKED_TYPES[WIDE] = PackedType((8,), scales=Scales.F32, sub_columns=16)
WIDENED_TYPES = frozenset(type_.name.lower() for type_ in _READABLE if type_.unpack and type_.packed is None)

# Types that stay as they are: bytes of a weight.
FLOAT_BYTES = {type_.name.lower(): type_.block_bytes for type_ in _READABLE if type_.unpack is None}


def packed_name(kind: str) -> str:
    """The name in PACKED_TYPES of a weight type, itself in lower case."""
    return WIDE if kind in WIDENED_TYPES else kind
