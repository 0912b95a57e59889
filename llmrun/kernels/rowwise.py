"""Ops that work on whole rows: normalization, quantization of activations, the gated activation.

All are cheap, so in a step of one row every thread runs them for itself (records.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from llmrun.kernels import records, simd
from llmrun.kernels.compiler import kernel, kernel_family
from llmrun.kernels.memory import load_f32, load_i32, load_i64, store_f32, store_i32
from llmrun.kernels.work import PRIVATE_INPUT, PRIVATE_OUTPUT, first_item, n_rows, next_item, private_row

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
    """x float32[rows, width], weight float32[width]; returns float32[rows, width]."""
    import numpy as np

    mean = np.square(x, dtype=np.float32).mean(-1, keepdims=True, dtype=np.float32)
    result: NDArray[np.float32] = x * (np.float32(1) / np.sqrt(mean + np.float32(epsilon))) * weight
    return result


# --- quantize -------------------------------------------------------------------------------------------------------

A_QUANT_X, A_QUANT_X_STRIDE, A_QUANT_Y, A_QUANT_Y_STRIDE, A_QUANT_SCALES, A_QUANT_OFFSETS = (
    ARG + 8 * i for i in range(6)
)
A_QUANT_SUMS, A_QUANT_HALF_SUMS, A_QUANT_SCALE_STRIDE, A_QUANT_BLOCKS = (ARG + 8 * i for i in range(6, 10))


def _quantize_vector(level: str) -> Any:
    @intrinsic
    def quantize(typingctx: Any, address: Any, vector: Any, inverse: Any) -> Any:
        """Write 16 floats as int8, rounded to nearest even; returns their sum."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address, vector, inverse = args
            scaled = builder.fmul(vector, simd.emit_splat(builder, inverse))
            # Adding 1.5 * 2^23 leaves the rounded integer in the low bits. |scaled| <= 127, or NaN, which becomes 0.
            magic = simd.constant(simd.F32X16, 12582912.0)
            ordered = builder.fcmp_ordered("ord", scaled, scaled)
            scaled = builder.select(ordered, scaled, simd.constant(simd.F32X16, 0.0))
            shifted = builder.bitcast(builder.fadd(scaled, magic), simd.I32X16)
            rounded = builder.sub(shifted, simd.constant(simd.I32X16, 0x4B400000))
            simd.emit_store(builder, address, builder.trunc(rounded, ir.VectorType(simd.I8, 16)))
            return builder.sext(simd.emit_fold(builder, rounded, builder.add), simd.I64)

        return types.int64(types.int64, simd.f32x16, types.float32), codegen

    return quantize


@kernel_family
def quantize(level: str) -> Callable[..., None]:
    """int8 per 32 values, and what dot products need of each block: its scale, -8 x its sum, scale x its sum, and minus
    the sum of each half."""
    quantize_vector = _quantize_vector(level)

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        x_stride = load_i64(op + A_QUANT_X_STRIDE)
        y_stride = load_i64(op + A_QUANT_Y_STRIDE)
        scale_stride = load_i64(op + A_QUANT_SCALE_STRIDE)
        n_blocks = load_i64(op + A_QUANT_BLOCKS)
        x0 = load_i64(op + A_QUANT_X) + private_row(op, step, thread, PRIVATE_INPUT) * x_stride
        first = private_row(op, step, thread, PRIVATE_OUTPUT)
        row = first_item(op, step)
        while row < rows:
            x = x0 + row * x_stride
            y = load_i64(op + A_QUANT_Y) + (first + row) * y_stride
            at = (first + row) * scale_stride
            for block in range(n_blocks):
                low = simd.load_f32x16(x + 128 * block)
                high = simd.load_f32x16(x + 128 * block + 64)
                largest = simd.max_lanes(simd.maximum(simd.absolute(low), simd.absolute(high)))
                scale = largest / types.float32(127)
                # Below 1e-37 the inverse would overflow; such a block is zero for every purpose.
                inverse = types.float32(0)
                if largest > types.float32(1e-36):
                    inverse = types.float32(127) / largest
                else:
                    scale = types.float32(0)
                low_sum = quantize_vector(y + 32 * block, low, inverse)
                high_sum = quantize_vector(y + 32 * block + 16, high, inverse)
                total = low_sum + high_sum
                store_f32(load_i64(op + A_QUANT_SCALES) + at + 4 * block, scale)
                store_i32(load_i64(op + A_QUANT_OFFSETS) + at + 4 * block, -8 * total)
                store_f32(load_i64(op + A_QUANT_SUMS) + at + 4 * block, scale * types.float32(total))
                store_i32(load_i64(op + A_QUANT_HALF_SUMS) + 2 * at + 8 * block, -low_sum)
                store_i32(load_i64(op + A_QUANT_HALF_SUMS) + 2 * at + 8 * block + 4, -high_sum)
            row = next_item(op, step, row)

    return run


def quantize_reference(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """x float32[rows, width], width a multiple of 32.

    Returns int8[rows, blocks, 32] and scales float32[rows, blocks].
    """
    import numpy as np

    blocks = x.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(-1)
    alive = largest > np.float32(1e-36)
    inverse = np.where(alive, np.float32(127) / np.where(alive, largest, np.float32(1)), np.float32(0))
    integers = np.rint(blocks * inverse[..., None]).astype(np.int8)
    return integers, np.where(alive, largest / np.float32(127), np.float32(0)).astype(np.float32)


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


def swiglu_reference(gate: NDArray[np.float32], up: NDArray[np.float32]) -> NDArray[np.float32]:
    """gate, up float32[rows, width]; returns float32[rows, width]."""
    import numpy as np

    e = np.exp(-np.abs(gate))
    top = np.where(gate < 0, e, np.float32(1))
    return (gate * (top / (np.float32(1) + e)) * up).astype(np.float32)
