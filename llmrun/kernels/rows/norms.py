"""RMSNorm and LayerNorm of rows. RMSNorm can also normalize each head or group of a row separately.

In a step of one row, every thread normalizes the whole row (records.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from llmrun.formats.layouts import records
from llmrun.formats.layouts.records import offsets
from llmrun.kernels.code import simd
from llmrun.kernels.code.load_store import load_f32, load_i32, load_i64
from llmrun.kernels.code.work import PRIVATE_INPUT, PRIVATE_OUTPUT, first_item, n_rows, next_item, private_row
from llmrun.kernels.compiler import inline_function, kernel, kernel_family
from llmrun.model.plan.ops.norms import NormWords

_NORM = offsets(NormWords)


@intrinsic
def root(typingctx: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(simd.F32, [simd.F32])
        root = cgutils.get_or_insert_function(builder.module, function, "llvm.sqrt.f32")
        return builder.call(root, args)

    return types.float32(types.float32), codegen


@inline_function
def _source(op: Any, step: Any, thread: Any, row: Any) -> Any:
    """Return the address of the input row for output row `row`.

    If `gathers` is set, `row` counts only the rows whose logits are requested.
    """
    source = row
    if load_i64(op + _NORM.gathers) != 0:
        source = load_i32(load_i64(step + records.STEP_WANTED_ROWS) + 4 * row)
    source += private_row(op, step, thread, PRIVATE_INPUT)
    return load_i64(op + _NORM.x) + source * load_i64(op + _NORM.x_stride)


@inline_function
def _target(op: Any, step: Any, thread: Any, row: Any) -> Any:
    out = load_i64(op + _NORM.out)
    return out + (row + private_row(op, step, thread, PRIVATE_OUTPUT)) * load_i64(op + _NORM.out_stride)


@kernel_family
def rmsnorm(level: str) -> Callable[..., None]:
    """Build the kernel that computes y = x / sqrt(mean(x^2) + epsilon) * weight, for each head or group separately."""
    fma = simd.Operations(level).fma

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        width = load_i64(op + _NORM.width)
        epsilon = load_f32(op + _NORM.epsilon)
        heads = load_i64(op + _NORM.heads)
        weight_step = load_i64(op + _NORM.weight_step)
        row = first_item(op, step, thread, n_threads, rows)
        while row < rows:
            x = _source(op, step, thread, row)
            y = _target(op, step, thread, row)
            weight = load_i64(op + _NORM.weight)
            for _ in range(heads):
                # Rows are padded with zeros to a whole number of vectors, which does not change the sum of squares.
                squares = simd.splat(types.float32(0))
                for at in range(0, 4 * width, 64):
                    value = simd.load_f32x16(x + at)
                    squares = fma(value, value, squares)
                mean = simd.sum_lanes(squares) / types.float32(width)
                scale = simd.splat(types.float32(1) / root(mean + epsilon))
                for at in range(0, 4 * width, 64):
                    normal = simd.multiply(simd.load_f32x16(x + at), scale)
                    simd.store_f32x16(y + at, simd.multiply(normal, simd.load_f32x16(weight + at)))
                x += 4 * width
                y += 4 * width
                weight += weight_step
            row = next_item(op, step, row, n_threads, rows)

    return run


@kernel_family
def layernorm(level: str) -> Callable[..., None]:
    """Build the kernel that computes y = (x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias.

    Weight and bias are padded with zeros.
    """
    fma = simd.Operations(level).fma

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        weight = load_i64(op + _NORM.weight)
        bias = load_i64(op + _NORM.bias)
        width = load_i64(op + _NORM.width)
        epsilon = load_f32(op + _NORM.epsilon)
        row = first_item(op, step, thread, n_threads, rows)
        while row < rows:
            x = _source(op, step, thread, row)
            y = _target(op, step, thread, row)
            total = simd.splat(types.float32(0))
            for at in range(0, 4 * width, 64):
                total = simd.add(total, simd.load_f32x16(x + at))
            mean = simd.splat(simd.sum_lanes(total) / types.float32(width))
            squares = simd.splat(types.float32(0))
            for at in range(0, 4 * width, 64):
                # Exclude the padding, which is no longer zero after the mean is subtracted.
                distance = simd.subtract(simd.load_f32x16(x + at), mean)
                distance = simd.keep_between(distance, 0, width - at // 4, types.float32(0))
                squares = fma(distance, distance, squares)
            variance = simd.sum_lanes(squares) / types.float32(width)
            scale = simd.splat(types.float32(1) / root(variance + epsilon))
            for at in range(0, 4 * width, 64):
                distance = simd.subtract(simd.load_f32x16(x + at), mean)
                normal = simd.multiply(simd.multiply(distance, scale), simd.load_f32x16(weight + at))
                simd.store_f32x16(y + at, simd.add(normal, simd.load_f32x16(bias + at)))
            row = next_item(op, step, row, n_threads, rows)

    return run
