"""The vector operations of the sampling kernel. Multiplications and additions are never fused, at any level."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.formats.layouts import sampling
from llmrun.kernels.code import simd

WEIGHTS = 16  # number of candidates that `weigh` processes at once

_F32S = ir.VectorType(simd.F32, WEIGHTS)
_F64S = ir.VectorType(ir.DoubleType(), WEIGHTS)
_I64S = ir.VectorType(simd.I64, WEIGHTS)
# Once this is added to a number of at most 2^51, its low bits contain the number, rounded to nearest even.
_MAGIC = 1.5 * 2.0**52


@intrinsic
def note_nan(typingctx: Any, noted: Any, vector: Any) -> Any:
    """Return `noted`, with NaN in the lanes where `vector` is NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        noted, vector = args
        return builder.select(builder.fcmp_unordered("uno", vector, vector), vector, noted)

    return simd.f32x16(simd.f32x16, simd.f32x16), codegen


@intrinsic
def any_nan(typingctx: Any, vector: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = builder.bitcast(builder.fcmp_unordered("uno", args[0], args[0]), simd.I16)
        return builder.icmp_unsigned("!=", lanes, simd.I16(0))

    return types.boolean(simd.f32x16), codegen


@intrinsic
def not_inlined(typingctx: Any) -> Any:
    """Keep LLVM from inlining the function that calls this."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def lanes_at_least(typingctx: Any, address: Any, bound: Any) -> Any:
    """Return a bit mask of the 16 floats at an address that are not below `bound`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = simd.emit_load(builder, args[0], simd.F32X16, 4)
        found = builder.fcmp_ordered(">=", values, simd.emit_splat(builder, args[1]))
        return builder.zext(builder.bitcast(found, simd.I16), simd.I64)

    return types.int64(types.int64, types.float32), codegen


@intrinsic
def copy_allowed_lanes(typingctx: Any, target: Any, source: Any, bits: Any) -> Any:
    """Copy 16 floats, replacing those whose bit is 0 with -inf."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, source, bits = args
        allowed = builder.bitcast(builder.trunc(bits, simd.I16), ir.VectorType(ir.IntType(1), WEIGHTS))
        banned = simd.constant(simd.F32X16, float("-inf"))
        values = builder.select(allowed, simd.emit_load(builder, source, simd.F32X16, 4), banned)
        simd.emit_store(builder, target, values, 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def any_weight_at_least(typingctx: Any, address: Any, bound: Any) -> Any:
    """Return whether one of the 16 weights (float64) at an address is not below `bound`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weights = simd.emit_load(builder, args[0], _F64S, 8)
        found = builder.fcmp_ordered(">=", weights, simd.emit_splat(builder, args[1], WEIGHTS))
        return builder.icmp_unsigned("!=", builder.bitcast(found, simd.I16), simd.I16(0))

    return types.boolean(types.int64, types.float64), codegen


@intrinsic
def weigh(typingctx: Any, logits: Any, largest: Any, temperature: Any, weights: Any, total: Any) -> Any:
    """Store exp((logit - largest) / temperature) of 16 logits, and return `total` plus their sum from left to right."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        logits, largest, temperature, weights, total = args
        x = builder.fpext(simd.emit_load(builder, logits, _F32S, 4), _F64S)
        x = builder.fsub(x, simd.emit_splat(builder, largest, WEIGHTS))
        x = builder.fdiv(x, simd.emit_splat(builder, temperature, WEIGHTS))
        found = _emit_exp(builder, x)
        simd.emit_store(builder, weights, found, 8)
        for lane in range(WEIGHTS):
            total = builder.fadd(total, builder.extract_element(found, simd.I32(lane)))
        return total

    return types.float64(types.int64, types.float64, types.float64, types.int64, types.float64), codegen


def _emit_exp(builder: Any, x: Any) -> Any:
    """Emit e^x of 16 float64 that are at most 0, as engine/sampling.py's `_exp` computes it."""
    lowest = simd.constant(_F64S, sampling.LOWEST_EXPONENT)
    below = builder.fcmp_ordered("<", x, lowest)
    x = builder.select(below, lowest, x)
    magic = simd.constant(_F64S, _MAGIC)
    shifted = builder.fadd(builder.fmul(x, simd.constant(_F64S, sampling.INVERSE_LN2)), magic)
    n = builder.fsub(shifted, magic)
    r = builder.fsub(x, builder.fmul(n, simd.constant(_F64S, sampling.LN2_HIGH)))
    r = builder.fsub(r, builder.fmul(n, simd.constant(_F64S, sampling.LN2_LOW)))
    result = simd.constant(_F64S, sampling.EXP_TERMS[0])
    for term in sampling.EXP_TERMS[1:]:
        result = builder.fadd(builder.fmul(result, r), simd.constant(_F64S, term))
    exponent = builder.add(builder.bitcast(shifted, _I64S), simd.constant(_I64S, 1023))
    scale = builder.bitcast(builder.shl(exponent, simd.constant(_I64S, 52)), _F64S)
    return builder.select(below, simd.constant(_F64S, 0.0), builder.fmul(result, scale))
