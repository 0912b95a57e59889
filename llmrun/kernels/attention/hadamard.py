"""The Hadamard rotation of keys, queries and values for caches of 8 and 4 bits. stored_kv.py explains it and contains
its NumPy twin."""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.formats.layouts.kv import KVType
from llmrun.kernels.code import simd
from llmrun.kernels.compiler import inline_function
from llmrun.model.plan.stored_kv import key_parts, read_factor, stored_factor, value_parts

_VECTOR = 4 * simd.LANES  # bytes


class Rotations(NamedTuple):
    """Functions that rotate a vector of floats: rotate(x, out) reads it at address x and writes it at address out.

    x and out may be equal. Without a rotation, the functions return x and write nothing; otherwise, they return out.

    stored  for keys or values
    read    for queries, or weighted sums of values
    """

    stored: Any
    read: Any


def key_rotations(kind: KVType, head_size: int) -> Rotations:
    return _rotations(kind, key_parts(head_size))


def value_rotations(kind: KVType, value_size: int) -> Rotations:
    return _rotations(kind, value_parts(value_size))


def _rotations(kind: KVType, parts: tuple[int, ...]) -> Rotations:
    if not kind.has_scales:
        return Rotations(_keep, _keep)
    return Rotations(
        *(_rotation(tuple((part, factor(part)) for part in parts)) for factor in (stored_factor, read_factor))
    )


@inline_function
def _keep(x: Any, out: Any) -> Any:
    return x


def _rotation(parts: tuple[tuple[int, float], ...]) -> Any:
    """Return a function that rotates parts, given as (size, factor)."""

    @inline_function
    def rotate(x: Any, out: Any) -> Any:
        start = 0
        for size, factor in parts:
            end = start + 4 * size
            for at in range(start, end, _VECTOR):
                scaled = simd.multiply(simd.load_f32x16(x + at), simd.splat(types.float32(factor)))
                simd.store_f32x16(out + at, _hadamard(scaled))
            distance = _VECTOR
            while distance < 4 * size:
                for pair in range(start, end, 2 * distance):
                    for at in range(pair, pair + distance, _VECTOR):
                        low, high = simd.load_f32x16(out + at), simd.load_f32x16(out + at + distance)
                        simd.store_f32x16(out + at, simd.add(low, high))
                        simd.store_f32x16(out + at + distance, simd.subtract(low, high))
                distance *= 2
            start = end
        return out

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
