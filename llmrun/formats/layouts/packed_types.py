"""The packed forms of all weight types by name, for kernels and lowering.

Each type's module in quants/ defines its packed form. Integer types without a packed form are stored as "wide", with
one byte per weight. This is exact, but it takes up more memory than the file.
"""

from __future__ import annotations

from llmrun.formats.quants.packed import PackedType, Scales
from llmrun.formats.quants.registry import BY_ID

WIDE = "wide"
WIDE_BYTES = 40  # size of 32 columns: two float32 scales, and an int8 for each column

_READABLE = [type_ for type_ in BY_ID.values() if type_.dequantize is not None]

PACKED_TYPES = {type_.name.lower(): type_.packed for type_ in _READABLE if type_.packed is not None}
PACKED_TYPES[WIDE] = PackedType((8,), scales=Scales.F32, sub_columns=16)
WIDENED_TYPES = frozenset(type_.name.lower() for type_ in _READABLE if type_.unpack and type_.packed is None)

# Unpacked types and their size in bytes per weight.
FLOAT_BYTES = {type_.name.lower(): type_.block_bytes for type_ in _READABLE if type_.unpack is None}


def packed_name(kind: str) -> str:
    """Return the key in PACKED_TYPES for a weight type's lower-case name."""
    return WIDE if kind in WIDENED_TYPES else kind
