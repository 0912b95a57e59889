"""A kernel that runs the building blocks of all kernels, to find out whether an instruction-set level works.

base/compiled/level_check.py runs the kernel in a child process, because an illegal instruction kills the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.formats.layouts.linear import PACKED_TYPES
from llmrun.kernels.code import dots, simd, unpack
from llmrun.kernels.code.load_store import load_i64
from llmrun.kernels.code.simd import F16X16, F32X16, I8X64, I32, I32X16
from llmrun.kernels.compiler import kernel, kernel_family

_LINE = 64
PAIR = (0, 16)  # the offsets of two rows of activations in the second line
ENTRIES = tuple(range(-40, 40, 5))  # of the table


@kernel_family
def trial(level: str) -> Callable[..., None]:
    """Build the kernel, whose record has two words: the addresses of the inputs and of the results.

    The inputs are lines of bytes below 16, any bytes, float16, and negative floats. Each result is a line.
    """
    compute = _computing(level)

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        compute(load_i64(op), load_i64(op + 8))

    return run


def _computing(level: str) -> Any:
    @intrinsic
    def compute(typingctx: Any, inputs: Any, results: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            for index, value in enumerate(_emit_values(builder, level, args[0])):
                simd.emit_store(builder, simd.emit_offset(builder, args[1], _LINE * index), value)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return compute


def _emit_values(builder: Any, level: str, base: Any) -> list[Any]:
    """Emit integer products of unsigned and of signed weights, table lookups, conversions, and float arithmetic.

    All levels round the results of the float operations in the same way.
    """

    def line(index: int, llvm_type: Any) -> Any:
        return simd.emit_load(builder, simd.emit_offset(builder, base, _LINE * index), llvm_type)

    small, any_bytes, halves, floats = line(0, I8X64), line(1, I8X64), line(2, F16X16), line(3, F32X16)
    activation = simd.emit_load(builder, simd.emit_offset(builder, base, _LINE), I32)
    zero = simd.constant(I32X16, 0)
    signed = PACKED_TYPES["q8_0"]
    weights = any_bytes
    bias = zero
    if dots.takes_unsigned(level, signed):  # add 128 to the weights, and correct for it in the sum
        weights = builder.xor(any_bytes, simd.constant(I8X64, -128))
        ones = dots.emit_dots(builder, "portable", signed, [simd.constant(I8X64, 1)], [activation], [zero])[0]
        bias = builder.mul(ones, simd.constant(I32X16, -128))
    entries = ir.Constant(ir.VectorType(simd.I8, 16), list(ENTRIES))
    wide = simd.emit_f16_to_f32(builder, level, halves)
    narrow = builder.bitcast(simd.emit_f32_to_f16(builder, level, wide), ir.VectorType(simd.I16, 16))
    larger = simd.emit_larger(builder, wide, floats)
    return [
        dots.emit_dots(builder, level, PACKED_TYPES["q4_0"], [small], [activation], [zero])[0],
        dots.emit_dots(builder, level, signed, [weights], [activation], [bias])[0],
        unpack.emit_lookup(builder, level, entries, small),
        builder.and_(builder.lshr(any_bytes, simd.constant(I8X64, 3)), simd.constant(I8X64, 15)),
        wide,
        builder.zext(narrow, I32X16),
        simd.emit_fma(builder, level, floats, floats, floats),
        builder.fptosi(floats, I32X16),
        builder.shuffle_vector(wide, larger, ir.Constant(I32X16, list(range(1, 32, 2)))),
        *_emit_pair(builder, level, base, [any_bytes, small]),
    ]


def _emit_pair(builder: Any, level: str, base: Any, weights: list[Any]) -> list[Any]:
    """Emit the products of signed weights, for 8 columns, and two rows of activations."""
    zero, rows = simd.constant(I32X16, 0), [simd.emit_offset(builder, base, _LINE + first) for first in PAIR]
    if dots.multiplies_pairs(level):
        activations = [[simd.emit_load(builder, row, simd.I8X16)] for row in rows]
        return dots.emit_pair_dots(builder, dots.emit_paired(builder, weights), activations, [zero, zero])
    signed = PACKED_TYPES["q8_0"]
    fours = [[simd.emit_load(builder, simd.emit_offset(builder, row, first), I32) for first in (0, 4)] for row in rows]
    return [dots.emit_dots(builder, "portable", signed, weights, activations, [zero])[0] for activations in fours]
