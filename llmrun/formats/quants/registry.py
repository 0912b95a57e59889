"""All weight types that a GGUF file may contain, by ID and by name. Each type is declared in the module of its format.

The IDs and sizes match ggml's `enum ggml_type` and its block structs. The missing IDs (4, 5, 31 to 33, and 36 to 38)
belong to types that ggml has removed.
"""

from __future__ import annotations

from llmrun.formats.quants import floats, fp4, iq1, iq2, iq3, iq4, k_quants, q4, q5, q8_0, ternary
from llmrun.formats.quants.weight_type import WeightType

_FORMATS = (floats, q4, q5, q8_0, k_quants, iq1, iq2, iq3, iq4, ternary, fp4)

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
