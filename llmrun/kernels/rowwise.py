"""Ops that work on whole rows: normalization, the gated activation.

All are cheap, so in a step of one row every thread runs them for itself (records.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from llmrun.kernels import records, simd
from llmrun.kernels.compiler import kernel, kernel_family
from llmrun.kernels.memory import load_f32, load_i32, load_i64
from llmrun.kernels.plan_ops import Activation
from llmrun.kernels.work import PRIVATE_OUTPUT, first_item, n_rows, next_item, private_row

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ARG = records.OP_ARGS


# --- rmsnorm -------------------------------------------------------------------------------------------------------

A_NORM_X, A_NORM_X_STRIDE, A_NORM_Y, A_NORM_Y_STRIDE, A_NORM_WEIGHT, A_NORM_WIDTH, A_NORM_EPSILON, A_NORM_GATHER = (
    ARG + 8 * i for i in range(8)
)


@intrinsic
def _root(typingctx: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(simd.F32, [simd.F32])
        root = cgutils.get_or_insert_function(builder.module, function, "llvm.sqrt.f32")
        return builder.call(root, args)

    return types.float32(types.float32), codegen


@kernel_family
def rmsnorm(level: str) -> Callable[..., None]:
    """y = x / sqrt(mean(x^2) + epsilon) * weight. With GATHER, row i reads the i-th wanted row of x."""
    fma = simd.Operations(level).fma

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        x_stride = load_i64(op + A_NORM_X_STRIDE)
        y_stride = load_i64(op + A_NORM_Y_STRIDE)
        y0 = load_i64(op + A_NORM_Y) + private_row(op, step, thread, PRIVATE_OUTPUT) * y_stride
        weight = load_i64(op + A_NORM_WEIGHT)
        width = load_i64(op + A_NORM_WIDTH)
        epsilon = load_f32(op + A_NORM_EPSILON)
        gather = load_i64(op + A_NORM_GATHER)
        row = first_item(op, step)
        while row < rows:
            source = row
            if gather != 0:
                source = load_i32(load_i64(step + records.STEP_WANTED_ROWS) + 4 * row)
            x = load_i64(op + A_NORM_X) + source * x_stride
            y = y0 + row * y_stride
            # Rows are padded with zeros to a whole number of vectors, which a sum of squares does not mind.
            squares = simd.splat(types.float32(0))
            for at in range(0, 4 * width, 64):
                value = simd.load_f32x16(x + at)
                squares = fma(value, value, squares)
            mean = simd.sum_lanes(squares) / types.float32(width)
            scale = simd.splat(types.float32(1) / _root(mean + epsilon))
            for at in range(0, 4 * width, 64):
                normal = simd.multiply(simd.load_f32x16(x + at), scale)
                simd.store_f32x16(y + at, simd.multiply(normal, simd.load_f32x16(weight + at)))
            row = next_item(op, step, row)

    return run


def rmsnorm_reference(x: NDArray[np.float32], weight: NDArray[np.float32], epsilon: float) -> NDArray[np.float32]:
    """x float32[..., width], weight float32[width]; returns x's shape."""
    import numpy as np

    mean = np.square(x, dtype=np.float32).mean(-1, keepdims=True, dtype=np.float32)
    result: NDArray[np.float32] = x * (np.float32(1) / np.sqrt(mean + np.float32(epsilon))) * weight
    return result


# --- gated activation ------------------------------------------------------------------------------------------------

A_GATE, A_GATE_STRIDE, A_UP, A_UP_STRIDE, A_GATED, A_GATED_STRIDE, A_GATED_WIDTH = (ARG + 8 * i for i in range(7))


@kernel_family
def swiglu(level: str) -> Callable[..., None]:
    """y = gate / (1 + exp(-gate)) * up."""
    operations = simd.Operations(level)
    exp = operations.exp

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        gate_stride = load_i64(op + A_GATE_STRIDE)
        up_stride = load_i64(op + A_UP_STRIDE)
        y_stride = load_i64(op + A_GATED_STRIDE)
        y0 = load_i64(op + A_GATED) + private_row(op, step, thread, PRIVATE_OUTPUT) * y_stride
        width = load_i64(op + A_GATED_WIDTH)
        one = simd.splat(types.float32(1))
        zero = simd.splat(types.float32(0))
        row = first_item(op, step)
        while row < rows:
            gate = load_i64(op + A_GATE) + row * gate_stride
            up = load_i64(op + A_UP) + row * up_stride
            y = y0 + row * y_stride
            for at in range(0, 4 * width, 64):
                value = simd.load_f32x16(gate + at)
                # exp takes arguments <= 0: sigmoid(x) = e / (1 + e) for x < 0 and 1 / (1 + e) above, e = exp(-|x|).
                e = exp(simd.subtract(zero, simd.absolute(value)))
                top = simd.select_negative(value, e, one)
                sigmoid = simd.divide(top, simd.add(one, e))
                simd.store_f32x16(y + at, simd.multiply(simd.multiply(value, sigmoid), simd.load_f32x16(up + at)))
            row = next_item(op, step, row)

    return run


def sigmoid_reference(x: NDArray[np.float32]) -> NDArray[np.float32]:
    import numpy as np

    e = np.exp(-np.abs(x))
    top = np.where(x < 0, e, np.float32(1))
    return (top / (np.float32(1) + e)).astype(np.float32)


def activation_reference(x: NDArray[np.float32], activation: Activation) -> NDArray[np.float32]:
    """SILU or GELU of float32[rows, width]."""
    import numpy as np

    if activation is Activation.SILU:
        gated: NDArray[np.float32] = x * sigmoid_reference(x)
        return gated
    assert activation is Activation.GELU
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    return (np.float32(0.5) * x * (np.float32(1) + np.tanh(inner))).astype(np.float32)


def gated_reference(gate: NDArray[np.float32], up: NDArray[np.float32], activation: Activation) -> NDArray[np.float32]:
    """gate, up float32[rows, width]; returns float32[rows, width]."""
    import numpy as np

    if activation is not Activation.CLAMPED_SILU:
        return activation_reference(gate, activation) * up
    gate = np.minimum(gate, np.float32(7))
    up = np.clip(up, np.float32(-7), np.float32(7))
    result: NDArray[np.float32] = gate * sigmoid_reference(np.float32(1.702) * gate) * (up + np.float32(1))
    return result


def soft_cap_reference(x: NDArray[np.float32], cap: float) -> NDArray[np.float32]:
    import numpy as np

    return (np.float32(cap) * np.tanh(x / np.float32(cap))).astype(np.float32)


def layernorm_reference(
    x: NDArray[np.float32], weight: NDArray[np.float32], bias: NDArray[np.float32] | None, epsilon: float
) -> NDArray[np.float32]:
    """x float32[rows, width], weight and bias float32[width]; returns float32[rows, width]."""
    import numpy as np

    centred = x - x.mean(-1, keepdims=True, dtype=np.float32)
    result = rmsnorm_reference(centred, weight, epsilon)
    return result if bias is None else result + bias
