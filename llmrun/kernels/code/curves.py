"""Smooth curves made of exp, of vectors in a kernel: sigmoid and tanh."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from llmrun.kernels.code import simd
from llmrun.kernels.compiler import inline_function

_BEND = 0.625
# (tanh(x) / x - 1) / x^2 by powers of x^2 up to _BEND^2, fitted at Chebyshev's points: off by 6e-10 there.
_TANH = (
    0.002295841255750122,
    -0.00834698048711579,
    0.021769960914390298,
    -0.053959405907854766,
    0.13333304277858132,
    -0.333333331778504,
)


def sigmoid(level: str) -> Any:
    """1 / (1 + exp(-x)) of f32x16: at most 4 ulp off while x is above -87, and no smaller below."""
    exp = simd.Operations(level).exp

    @inline_function
    def of(x: Any) -> Any:
        # exp takes arguments <= 0: sigmoid(x) = e / (1 + e) for x < 0 and 1 / (1 + e) above, e = exp(-|x|).
        one = simd.splat(types.float32(1))
        e = exp(simd.subtract(simd.splat(types.float32(0)), simd.absolute(x)))
        return simd.divide(simd.select_negative(x, e, one), simd.add(one, e))

    return of


def tanh(level: str) -> Any:
    """Of f32x16: at most 3 ulp off; a NaN stays one."""

    @intrinsic
    def of(typingctx: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit_tanh(builder, level, args[0])

        return simd.f32x16(simd.f32x16), codegen

    return of


def emit_tanh(builder: Any, level: str, x: Any) -> Any:
    """Of <16 x float>. Near 0, where 1 - exp(-2|x|) would lose its digits, a polynomial."""
    size = simd.emit_absolute(builder, x)
    e = simd.emit_exp(builder, level, builder.fmul(size, simd.constant(simd.F32X16, -2.0)))
    one = simd.constant(simd.F32X16, 1.0)
    large = builder.fdiv(builder.fsub(one, e), builder.fadd(one, e))
    square = builder.fmul(x, x)
    p = simd.constant(simd.F32X16, _TANH[0])
    for coefficient in _TANH[1:]:
        p = simd.emit_fma(builder, level, p, square, simd.constant(simd.F32X16, coefficient))
    small = simd.emit_fma(builder, level, builder.fmul(p, square), x, x)
    sign = builder.and_(builder.bitcast(x, simd.I32X16), simd.constant(simd.I32X16, 0x80000000))
    large = builder.bitcast(builder.or_(builder.bitcast(large, simd.I32X16), sign), simd.F32X16)
    return builder.select(builder.fcmp_ordered("<", size, simd.constant(simd.F32X16, _BEND)), small, large)
