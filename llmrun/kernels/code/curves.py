"""The vector functions sigmoid, softplus, tanh and the normal distribution for kernels, all computed from exp."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from llmrun.kernels.code import simd
from llmrun.kernels.compiler import inline_function

_BEND = 0.625
# Coefficients of (tanh(x) / x - 1) / x^2 as a polynomial in x^2 for |x| up to _BEND, fitted at the Chebyshev nodes. The
# error is at most 6e-10.
_TANH = (
    0.002295841255750122,
    -0.00834698048711579,
    0.021769960914390298,
    -0.053959405907854766,
    0.13333304277858132,
    -0.333333331778504,
)

# Coefficients of a polynomial P in t = 1 / (1 + _TAIL_SLOPE z). For z from 0 to 13, exp(-z^2 / 2) t P(t) is the
# probability that a standard normal variable is below -z. P was fitted at Chebyshev nodes, and its relative error is at
# most 1.2e-7.
_TAIL_SLOPE = 0.3
_TAIL = (
    0.036088877432847145,
    -0.15893388487019694,
    0.2093466456991737,
    -0.05645032121044469,
    0.13003273256943576,
    0.09946503053828293,
    0.12082631979306883,
    0.11962454060519642,
)


def sigmoid(level: str) -> Any:
    """Return a function, callable from kernels, that computes 1 / (1 + exp(-x)) for each element of an f32x16 vector.

    The error is at most 4 ulp for x above -87. Smaller values are treated as -87.
    """
    exp = simd.Operations(level).exp

    @inline_function
    def of(x: Any) -> Any:
        # Our exp only supports arguments <= 0. With e = exp(-|x|), sigmoid(x) is e / (1 + e) for x < 0, and
        # 1 / (1 + e) otherwise.
        one = simd.splat(types.float32(1))
        e = exp(simd.subtract(simd.splat(types.float32(0)), simd.absolute(x)))
        return simd.divide(simd.select_negative(x, e, one), simd.add(one, e))

    return of


def softplus(level: str) -> Any:
    """Return a function, callable from kernels, that computes log(1 + exp(x)) for each element of an f32x16 vector.

    It is max(x, 0) + log(1 + e) with e = exp(-|x|). The logarithm is a series in z = e / (2 + e), which is at most 1/3:
    log(1 + e) = 2 (z + z^3 / 3 + z^5 / 5 + ...). The error is at most 4 ulp for x above -87, and softplus(NaN) is NaN.
    """
    operations = simd.Operations(level)
    exp, fma = operations.exp, operations.fma

    @inline_function
    def of(x: Any) -> Any:
        zero = simd.splat(types.float32(0))
        e = exp(simd.subtract(zero, simd.absolute(x)))
        z = simd.divide(e, simd.add(simd.splat(types.float32(2)), e))
        square = simd.multiply(z, z)
        p = simd.splat(types.float32(2 / 15))
        p = fma(p, square, simd.splat(types.float32(2 / 13)))
        p = fma(p, square, simd.splat(types.float32(2 / 11)))
        p = fma(p, square, simd.splat(types.float32(2 / 9)))
        p = fma(p, square, simd.splat(types.float32(2 / 7)))
        p = fma(p, square, simd.splat(types.float32(2 / 5)))
        p = fma(p, square, simd.splat(types.float32(2 / 3)))
        p = fma(p, square, simd.splat(types.float32(2)))
        return simd.add(simd.select_negative(x, zero, x), simd.multiply(p, z))

    return of


def normal_distribution(level: str) -> Any:
    """Return a function, callable from kernels, that computes (1 + erf(x / sqrt(2))) / 2 for an f32x16 vector.

    The error is at most 7 ulp for x near 0. For large negative x, it grows like that of exp(-x^2 / 2).
    """
    operations = simd.Operations(level)
    exp, fma = operations.exp, operations.fma

    @inline_function
    def of(x: Any) -> Any:
        one, z = simd.splat(types.float32(1)), simd.absolute(x)
        t = simd.divide(one, fma(simd.splat(types.float32(_TAIL_SLOPE)), z, one))
        p = simd.splat(types.float32(_TAIL[0]))
        p = fma(p, t, simd.splat(types.float32(_TAIL[1])))
        p = fma(p, t, simd.splat(types.float32(_TAIL[2])))
        p = fma(p, t, simd.splat(types.float32(_TAIL[3])))
        p = fma(p, t, simd.splat(types.float32(_TAIL[4])))
        p = fma(p, t, simd.splat(types.float32(_TAIL[5])))
        p = fma(p, t, simd.splat(types.float32(_TAIL[6])))
        p = fma(p, t, simd.splat(types.float32(_TAIL[7])))
        e = exp(simd.multiply(simd.multiply(simd.splat(types.float32(-0.5)), z), z))
        tail = simd.multiply(simd.multiply(e, t), p)
        return simd.select_negative(x, tail, simd.subtract(one, tail))

    return of


def tanh(level: str) -> Any:
    """Return a function, callable from kernels, that computes tanh(x) for each element of an f32x16 vector.

    The error is at most 3 ulp, and tanh(NaN) is NaN.
    """

    @intrinsic
    def of(typingctx: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit_tanh(builder, level, args[0])

        return simd.f32x16(simd.f32x16), codegen

    return of


def emit_tanh(builder: Any, level: str, x: Any) -> Any:
    """Emit tanh(x) for a <16 x float>.

    Near 0, it uses a polynomial, because 1 - exp(-2|x|) would lose precision there.
    """
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
