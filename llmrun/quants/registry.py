"""Every weight type a GGUF file may hold: its number in the file, its block sizes and, where we read it, how.

The numbers and sizes are those of ggml's `enum ggml_type` and its block structs; the gaps (4, 5, 31 to 33, 36
to 38) are types ggml has removed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmrun.quants import floats, fp4, iq1, iq2, iq3, iq4, k_quants, q4, q5, q8_0, ternary, unpacked
from llmrun.quants.fields import SUPER_BLOCK
from llmrun.quants.unpacked import Unpack

Dequantize = Callable[[NDArray[np.uint8]], NDArray[np.float32]]
Quantize = Callable[[NDArray[np.float32]], NDArray[np.uint8]]


@dataclass(frozen=True)
class WeightType:
    """One way of storing weights: `block_weights` consecutive weights of a row in `block_bytes` bytes.

    dequantize  uint8[..., blocks * block_bytes] -> float32[..., blocks * block_weights], the reference; None
                when the type is known to the format but not readable by this build
    quantize    the inverse, with the rounding of gguf-py; None where gguf-py has none, and as above
    unpack      the same bytes as integers and their scales (unpacked.py), of which `dequantize` is the product; None
                for weights that are floats of their own, and as above

    That a type can be read here does not say that the CPU engine runs it: kernels do that (kernels/weights.py).
    """

    name: str
    ggml_id: int
    block_weights: int
    block_bytes: int
    dequantize: Dequantize | None = None
    quantize: Quantize | None = None
    unpack: Unpack | None = None

    def row_bytes(self, n: int) -> int:
        """Bytes of a row of n weights. Raises ValueError unless n is a multiple of the block."""
        blocks, rest = divmod(n, self.block_weights)
        if rest:
            raise ValueError(f"{n} weights are no whole number of {self.name} blocks of {self.block_weights}")
        return blocks * self.block_bytes


def _of_integers(
    name: str, ggml_id: int, block_weights: int, block_bytes: int, unpack: Unpack, quantize: Quantize | None = None
) -> WeightType:
    return WeightType(
        name, ggml_id, block_weights, block_bytes, lambda raw: unpacked.dequantize(unpack(raw)), quantize, unpack
    )


_READABLE = (
    WeightType("F32", 0, 1, 4, floats.dequantize_f32, floats.quantize_f32),
    WeightType("F16", 1, 1, 2, floats.dequantize_f16, floats.quantize_f16),
    _of_integers("Q4_0", 2, q4.BLOCK_WEIGHTS, q4.Q4_0_BYTES, q4.unpack_q4_0, q4.quantize_q4_0),
    _of_integers("Q4_1", 3, q4.BLOCK_WEIGHTS, q4.Q4_1_BYTES, q4.unpack_q4_1, q4.quantize_q4_1),
    _of_integers("Q5_0", 6, q5.BLOCK_WEIGHTS, q5.Q5_0_BYTES, q5.unpack_q5_0, q5.quantize_q5_0),
    _of_integers("Q5_1", 7, q5.BLOCK_WEIGHTS, q5.Q5_1_BYTES, q5.unpack_q5_1, q5.quantize_q5_1),
    _of_integers("Q8_0", 8, q8_0.BLOCK_WEIGHTS, q8_0.BLOCK_BYTES, q8_0.unpack, q8_0.quantize),
    _of_integers("Q2_K", 10, SUPER_BLOCK, k_quants.Q2_K_BYTES, k_quants.unpack_q2_k),
    _of_integers("Q3_K", 11, SUPER_BLOCK, k_quants.Q3_K_BYTES, k_quants.unpack_q3_k),
    _of_integers("Q4_K", 12, SUPER_BLOCK, k_quants.Q4_K_BYTES, k_quants.unpack_q4_k),
    _of_integers("Q5_K", 13, SUPER_BLOCK, k_quants.Q5_K_BYTES, k_quants.unpack_q5_k),
    _of_integers("Q6_K", 14, SUPER_BLOCK, k_quants.Q6_K_BYTES, k_quants.unpack_q6_k),
    _of_integers("IQ2_XXS", 16, SUPER_BLOCK, iq2.IQ2_XXS_BYTES, iq2.unpack_iq2_xxs),
    _of_integers("IQ2_XS", 17, SUPER_BLOCK, iq2.IQ2_XS_BYTES, iq2.unpack_iq2_xs),
    _of_integers("IQ3_XXS", 18, SUPER_BLOCK, iq3.IQ3_XXS_BYTES, iq3.unpack_iq3_xxs),
    _of_integers("IQ1_S", 19, SUPER_BLOCK, iq1.IQ1_S_BYTES, iq1.unpack_iq1_s),
    _of_integers("IQ4_NL", 20, iq4.IQ4_NL_WEIGHTS, iq4.IQ4_NL_BYTES, iq4.unpack_iq4_nl),
    _of_integers("IQ3_S", 21, SUPER_BLOCK, iq3.IQ3_S_BYTES, iq3.unpack_iq3_s),
    _of_integers("IQ2_S", 22, SUPER_BLOCK, iq2.IQ2_S_BYTES, iq2.unpack_iq2_s),
    _of_integers("IQ4_XS", 23, SUPER_BLOCK, iq4.IQ4_XS_BYTES, iq4.unpack_iq4_xs),
    _of_integers("IQ1_M", 29, SUPER_BLOCK, iq1.IQ1_M_BYTES, iq1.unpack_iq1_m),
    WeightType("BF16", 30, 1, 2, floats.dequantize_bf16, floats.quantize_bf16),
    _of_integers("TQ1_0", 34, SUPER_BLOCK, ternary.TQ1_0_BYTES, ternary.unpack_tq1_0, ternary.quantize_tq1_0),
    _of_integers("TQ2_0", 35, SUPER_BLOCK, ternary.TQ2_0_BYTES, ternary.unpack_tq2_0, ternary.quantize_tq2_0),
    _of_integers("MXFP4", 39, fp4.MXFP4_WEIGHTS, fp4.MXFP4_BYTES, fp4.unpack_mxfp4, fp4.quantize_mxfp4),
    _of_integers("NVFP4", 40, fp4.NVFP4_WEIGHTS, fp4.NVFP4_BYTES, fp4.unpack_nvfp4),
)

_KNOWN = (
    # gguf-py says 40 bytes here; ggml's struct is two f16 and 32 int8. No file holds this type.
    WeightType("Q8_1", 9, 32, 36),
    WeightType("Q8_K", 15, 256, 292),  # activations, on the way: no file holds it either
    WeightType("I8", 24, 1, 1),
    WeightType("I16", 25, 1, 2),
    WeightType("I32", 26, 1, 4),
    WeightType("I64", 27, 1, 8),
    WeightType("F64", 28, 1, 8),
    WeightType("Q1_0", 41, 128, 18),
    WeightType("Q2_0", 42, 64, 18),
)

BY_ID: dict[int, WeightType] = {type_.ggml_id: type_ for type_ in sorted(_READABLE + _KNOWN, key=lambda t: t.ggml_id)}
BY_NAME: dict[str, WeightType] = {type_.name: type_ for type_ in BY_ID.values()}
