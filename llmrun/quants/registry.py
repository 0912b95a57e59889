"""Every weight type a GGUF file may hold: its number in the file, its block sizes and, where we read it, how.

The numbers and sizes are those of ggml's `enum ggml_type` and its block structs; the gaps (4, 5, 31 to 33, 36
to 38) are types ggml has removed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmrun.quants import floats, q4, q8_0

Dequantize = Callable[[NDArray[np.uint8]], NDArray[np.float32]]
Quantize = Callable[[NDArray[np.float32]], NDArray[np.uint8]]


@dataclass(frozen=True)
class WeightType:
    """One way of storing weights: `block_weights` consecutive weights of a row in `block_bytes` bytes.

    dequantize  uint8[..., blocks * block_bytes] -> float32[..., blocks * block_weights], the reference; None
                when the type is known to the format but not readable by this build
    quantize    the inverse, with the rounding of gguf-py; None as above
    """

    name: str
    ggml_id: int
    block_weights: int
    block_bytes: int
    dequantize: Dequantize | None = None
    quantize: Quantize | None = None

    def row_bytes(self, n: int) -> int:
        """Bytes of a row of n weights. Raises ValueError unless n is a multiple of the block."""
        blocks, rest = divmod(n, self.block_weights)
        if rest:
            raise ValueError(f"{n} weights are no whole number of {self.name} blocks of {self.block_weights}")
        return blocks * self.block_bytes


_READABLE = (
    WeightType("F32", 0, 1, 4, floats.dequantize_f32, floats.quantize_f32),
    WeightType("F16", 1, 1, 2, floats.dequantize_f16, floats.quantize_f16),
    WeightType("Q4_0", 2, q4.BLOCK_WEIGHTS, q4.Q4_0_BYTES, q4.dequantize_q4_0, q4.quantize_q4_0),
    WeightType("Q4_1", 3, q4.BLOCK_WEIGHTS, q4.Q4_1_BYTES, q4.dequantize_q4_1, q4.quantize_q4_1),
    WeightType("Q8_0", 8, q8_0.BLOCK_WEIGHTS, q8_0.BLOCK_BYTES, q8_0.dequantize, q8_0.quantize),
    WeightType("BF16", 30, 1, 2, floats.dequantize_bf16, floats.quantize_bf16),
)

_KNOWN = (
    WeightType("Q5_0", 6, 32, 22),
    WeightType("Q5_1", 7, 32, 24),
    # gguf-py says 40 bytes here; ggml's struct is two f16 and 32 int8. No file holds this type.
    WeightType("Q8_1", 9, 32, 36),
    WeightType("Q2_K", 10, 256, 84),
    WeightType("Q3_K", 11, 256, 110),
    WeightType("Q4_K", 12, 256, 144),
    WeightType("Q5_K", 13, 256, 176),
    WeightType("Q6_K", 14, 256, 210),
    WeightType("Q8_K", 15, 256, 292),
    WeightType("IQ2_XXS", 16, 256, 66),
    WeightType("IQ2_XS", 17, 256, 74),
    WeightType("IQ3_XXS", 18, 256, 98),
    WeightType("IQ1_S", 19, 256, 50),
    WeightType("IQ4_NL", 20, 32, 18),
    WeightType("IQ3_S", 21, 256, 110),
    WeightType("IQ2_S", 22, 256, 82),
    WeightType("IQ4_XS", 23, 256, 136),
    WeightType("I8", 24, 1, 1),
    WeightType("I16", 25, 1, 2),
    WeightType("I32", 26, 1, 4),
    WeightType("I64", 27, 1, 8),
    WeightType("F64", 28, 1, 8),
    WeightType("IQ1_M", 29, 256, 56),
    WeightType("TQ1_0", 34, 256, 54),
    WeightType("TQ2_0", 35, 256, 66),
    WeightType("MXFP4", 39, 32, 17),
    WeightType("NVFP4", 40, 64, 36),
    WeightType("Q1_0", 41, 128, 18),
    WeightType("Q2_0", 42, 64, 18),
)

BY_ID: dict[int, WeightType] = {type_.ggml_id: type_ for type_ in sorted(_READABLE + _KNOWN, key=lambda t: t.ggml_id)}
BY_NAME: dict[str, WeightType] = {type_.name: type_ for type_ in BY_ID.values()}
