"""The Hadamard rotation of keys and queries for a q8_0 cache. stored_kv.py explains it and contains its NumPy twin."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.kernels.code import simd
from llmrun.kernels.compiler import inline_function
from llmrun.layouts.kv_blocks import GROUP
from llmrun.plan.stored_kv import KEY_FACTORS, QUERY_FACTORS


def hadamard_of(head_size: int) -> tuple[Any, Any]:
    """Return (rotate_key, rotate_query). Each function rotates a float32[head size] in place."""
    return _rotation(head_size, KEY_FACTORS), _rotation(head_size, QUERY_FACTORS)


def _rotation(head_size: int, factors: dict[int, float]) -> Any:
    whole = head_size // GROUP * GROUP
    factor, last_factor = factors[GROUP], factors[simd.LANES]

    @inline_function
    def rotate(x: Any) -> Any:
        for feature in range(0, whole, GROUP):
            low = _hadamard(simd.load_f32x16(x + 4 * feature))
            high = _hadamard(simd.load_f32x16(x + 4 * feature + 64))
            scale = simd.splat(types.float32(factor))
            simd.store_f32x16(x + 4 * feature, simd.multiply(simd.add(low, high), scale))
            simd.store_f32x16(x + 4 * feature + 64, simd.multiply(simd.subtract(low, high), scale))
        if whole < head_size:
            last = _hadamard(simd.load_f32x16(x + 4 * whole))
            simd.store_f32x16(x + 4 * whole, simd.multiply(last, simd.splat(types.float32(last_factor))))

    return rotate


@intrinsic
def _hadamard(typingctx: Any, vector: Any) -> Any:
    """Multiply 16 floats by a 16 x 16 Hadamard matrix.

    It uses sums and differences of lanes that are 1, 2, 4 and 8 apart.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        [vector] = args
        for distance in (1, 2, 4, 8):
            lanes = ir.Constant(ir.VectorType(simd.I32, 16), [lane ^ distance for lane in range(16)])
            partners = builder.shuffle_vector(vector, vector, lanes)
            signs = ir.Constant(simd.F32X16, [-1.0 if lane & distance else 1.0 for lane in range(16)])
            vector = builder.fadd(partners, builder.fmul(vector, signs))
        return vector

    return simd.f32x16(simd.f32x16), codegen
