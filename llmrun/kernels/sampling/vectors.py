"""The vector operations of the sampling kernel, and a radix sort of the candidates by probability.

Multiplications and additions are never fused, at any level.

The time of the sort does not depend on the logits. A candidate is a word: the sort key in the upper half, the token id
in the lower half. The likeliest token has the smallest key. The sort is stable, so among equal logits the order of ids
stays.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.formats.layouts import tokens
from llmrun.formats.layouts.tokens import DIGIT_BITS, N_DIGITS
from llmrun.kernels.code import simd
from llmrun.kernels.code.load_store import load_i32, load_i64, store_i32, store_i64
from llmrun.kernels.compiler import called_function, inline_function

_LOW_HALF = 0xFFFFFFFF
_MAGNITUDE = 0x7FFFFFFF
_SIGN = 0x80000000
_INFINITY = 0x7F800000  # the bits of a float32
_DIGITS = 1 << DIGIT_BITS


@inline_function
def sort_key(logit_bits: Any) -> Any:
    """Return the key of a logit, which is at least 0 and below 2^32. -0 and 0 have the same key."""
    return _INFINITY - (logit_bits if logit_bits >= 0 else -(logit_bits & _MAGNITUDE))


@inline_function
def logit_bits_of(key: Any) -> Any:
    ordered = _INFINITY - key
    return ordered if ordered >= 0 else -ordered | _SIGN


@inline_function
def key_of(word: Any) -> Any:
    return (word >> 32) & _LOW_HALF


@called_function
def sort_candidates(logits: Any, ids: Any, n: Any, words: Any, room: Any) -> None:
    """Sort n candidates, float32 logits and int32 ids, by probability. Among equal logits, their order stays.

    `words` is memory for int64[2 * room] and for the counts. The digits of all passes are counted at once. A pass whose
    digit is the same in all words is left out.
    """
    not_inlined()
    spare, counts = words + 8 * room, words + 16 * room
    for i in range(0, 4 * N_DIGITS * _DIGITS, 8):
        store_i64(counts + i, 0)
    for i in range(n):
        key = sort_key(load_i32(logits + 4 * i))
        store_i64(words + 8 * i, key << 32 | load_i32(ids + 4 * i))
        for digit in range(N_DIGITS):
            at = counts + 4 * (digit * _DIGITS + ((key >> (digit * DIGIT_BITS)) & (_DIGITS - 1)))
            store_i32(at, load_i32(at) + 1)
    for digit in range(N_DIGITS):
        starts, shift = counts + 4 * digit * _DIGITS, digit * DIGIT_BITS
        if load_i32(starts + 4 * (key_of(load_i64(words)) >> shift & (_DIGITS - 1))) == n:
            continue
        start = 0
        for at in range(starts, starts + 4 * _DIGITS, 4):
            count = load_i32(at)
            store_i32(at, start)
            start += count
        for i in range(n):
            word = load_i64(words + 8 * i)
            at = starts + 4 * (key_of(word) >> shift & (_DIGITS - 1))
            place = load_i32(at)
            store_i32(at, place + 1)
            store_i64(spare + 8 * place, word)
        words, spare = spare, words
    for i in range(n):
        word = load_i64(words + 8 * i)
        store_i32(logits + 4 * i, logit_bits_of(key_of(word)))
        store_i32(ids + 4 * i, word)


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
    """Emit e^x of 16 float64 that are at most 0, as `exp` of engine/sampling.py computes it."""
    lowest = simd.constant(_F64S, tokens.LOWEST_EXPONENT)
    below = builder.fcmp_ordered("<", x, lowest)
    x = builder.select(below, lowest, x)
    magic = simd.constant(_F64S, _MAGIC)
    shifted = builder.fadd(builder.fmul(x, simd.constant(_F64S, tokens.INVERSE_LN2)), magic)
    n = builder.fsub(shifted, magic)
    r = builder.fsub(x, builder.fmul(n, simd.constant(_F64S, tokens.LN2_HIGH)))
    r = builder.fsub(r, builder.fmul(n, simd.constant(_F64S, tokens.LN2_LOW)))
    result = simd.constant(_F64S, tokens.EXP_TERMS[0])
    for term in tokens.EXP_TERMS[1:]:
        result = builder.fadd(builder.fmul(result, r), simd.constant(_F64S, term))
    exponent = builder.add(builder.bitcast(shifted, _I64S), simd.constant(_I64S, 1023))
    scale = builder.bitcast(builder.shl(exponent, simd.constant(_I64S, 52)), _F64S)
    return builder.select(below, simd.constant(_F64S, 0.0), builder.fmul(result, scale))
