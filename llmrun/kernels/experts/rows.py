"""Kernels that add biases to the experts' outputs and compute their weighted sums."""

from __future__ import annotations

from typing import Any

from numba import types

from llmrun.formats.layouts import records
from llmrun.kernels.code import simd
from llmrun.kernels.code.load_store import load_f32, load_i32, load_i64
from llmrun.kernels.code.work import (
    PRIVATE_INPUT,
    PRIVATE_OUTPUT,
    REPLICATED,
    first_item,
    n_rows,
    next_item,
    own_copy,
    private_row,
)
from llmrun.kernels.compiler import kernel
from llmrun.model.plan.ops.experts import CombineWords, ExpertBiasWords

_BIAS = records.offsets(ExpertBiasWords)
_COMBINE = records.offsets(CombineWords)

# --- bias -------------------------------------------------------------------------------------------------------------


@kernel
def bias(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
    """Compute y = x + bias for each row, with the bias of the row's expert."""
    slots = n_rows(op, step)
    x_stride, y_stride = load_i64(op + _BIAS.x_stride), load_i64(op + _BIAS.out_stride)
    x0 = load_i64(op + _BIAS.x) + private_row(op, step, thread, PRIVATE_INPUT) * x_stride
    y0 = load_i64(op + _BIAS.out) + private_row(op, step, thread, PRIVATE_OUTPUT) * y_stride
    copy = own_copy(op, step, thread, REPLICATED)
    experts = load_i64(op + _BIAS.experts) + copy * load_i64(op + _BIAS.row_bytes)
    slot = first_item(op, step, thread, n_threads, slots)
    while slot < slots:
        biases = load_i64(op + _BIAS.bias) + load_i32(experts + 4 * slot) * load_i64(op + _BIAS.bias_stride)
        for at in range(0, 4 * load_i64(op + _BIAS.width), 64):
            value = simd.load_f32x16(x0 + slot * x_stride + at)
            simd.store_f32x16(y0 + slot * y_stride + at, simd.add(value, simd.load_f32x16(biases + at)))
        slot = next_item(op, step, slot, n_threads, slots)


# --- combine ----------------------------------------------------------------------------------------------------------

# Columns per work item. With this size, four threads can share a row of 2,048 columns. Claiming an item takes 50 ns,
# and combining 512 columns of 8 experts takes 300 ns.
COLUMNS = 512


@kernel
def combine(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
    """Sum weight * y over the experts of each row, in order, and store the sum in `out` or add it to `out`.

    Each work item is a range of columns in a row, so that threads can share the work even in a step of one row.
    """
    used, width, adds = load_i64(op + _COMBINE.used), load_i64(op + _COMBINE.width), load_i64(op + _COMBINE.adds)
    copy = 0
    if load_i64(step + records.STEP_REPLICATED) != 0:
        copy = thread
    y_stride = load_i64(op + _COMBINE.y_stride)
    y0 = load_i64(op + _COMBINE.y) + own_copy(op, step, thread, PRIVATE_INPUT) * used * y_stride
    n_chunks = (width + COLUMNS - 1) // COLUMNS
    end = n_rows(op, step) * n_chunks
    out0 = load_i64(op + _COMBINE.out)
    out0 += private_row(op, step, thread, PRIVATE_OUTPUT) * load_i64(op + _COMBINE.out_stride)
    item = first_item(op, step, thread, n_threads, end)
    while item < end:
        row, column = item // n_chunks, item % n_chunks * COLUMNS
        table = (copy + row) * load_i64(op + _COMBINE.row_bytes)
        slots, weights = load_i64(op + _COMBINE.slots) + table, load_i64(op + _COMBINE.weights) + table
        out = out0 + row * load_i64(op + _COMBINE.out_stride)
        for at in range(4 * column, 4 * min(column + COLUMNS, width), 64):
            total = simd.splat(types.float32(0))
            for index in range(used):
                y = y0 + load_i32(slots + 4 * index) * y_stride
                weight = simd.splat(load_f32(weights + 4 * index))
                total = simd.add(total, simd.multiply(simd.load_f32x16(y + at), weight))
            if adds != 0:
                total = simd.add(simd.load_f32x16(out + at), total)
            simd.store_f32x16(out + at, total)
        item = next_item(op, step, item, n_threads, end)
