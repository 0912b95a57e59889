"""Smooth curves made of exp: sigmoid and tanh, of vectors in a kernel and of NumPy's arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import types

from llmrun.kernels import simd
from llmrun.kernels.compiler import inline_function

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# tanh(x) = x + x^3 p(x^2) below the bend: a minimax fit, 5e-9 off. Above it, 1 - exp(-2x) loses less than half a bit.
_BEND = 0.625
_TANH = (-0.005704912822693586, 0.02063901349902153, -0.05373968929052353, 0.13331441581249237, -0.3333328068256378)
_P4, _P3, _P2, _P1, _P0 = _TANH


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
    """Of f32x16: at most 3 ulp off."""
    operations = simd.Operations(level)
    fma, exp = operations.fma, operations.exp

    @inline_function
    def of(x: Any) -> Any:
        size = simd.absolute(x)
        square = simd.multiply(x, x)
        p = fma(simd.splat(types.float32(_P4)), square, simd.splat(types.float32(_P3)))
        p = fma(p, square, simd.splat(types.float32(_P2)))
        p = fma(p, square, simd.splat(types.float32(_P1)))
        p = fma(p, square, simd.splat(types.float32(_P0)))
        small = fma(simd.multiply(p, square), x, x)
        # (1 - e) / (1 + e) with e = exp(-2|x|), and x's sign.
        one, zero = simd.splat(types.float32(1)), simd.splat(types.float32(0))
        e = exp(simd.multiply(size, simd.splat(types.float32(-2))))
        large = simd.divide(simd.subtract(one, e), simd.add(one, e))
        large = simd.select_negative(x, simd.subtract(zero, large), large)
        is_small = simd.subtract(size, simd.splat(types.float32(_BEND)))
        return simd.select_negative(is_small, small, large)

    return of


def sigmoid_reference(x: NDArray[np.float32]) -> NDArray[np.float32]:
    import numpy as np

    e = np.exp(-np.abs(x))
    top = np.where(x < 0, e, np.float32(1))
    return (top / (np.float32(1) + e)).astype(np.float32)


def soft_cap_reference(x: NDArray[np.float32], cap: float) -> NDArray[np.float32]:
    """cap * tanh(x / cap)"""
    import numpy as np

    return (np.float32(cap) * np.tanh(x / np.float32(cap))).astype(np.float32)
