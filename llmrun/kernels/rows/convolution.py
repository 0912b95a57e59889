"""The gated short convolution of LFM2, which stores its inputs in the blocks of the KV cache.

A block is a float32[32 positions, features] of b * y. A row depends on earlier rows of the same step, which another
thread may compute. Therefore all rows are stored first, and all rows are convolved after a barrier. In a step of one
row, every thread does both, and all threads store the same bytes.
"""

from __future__ import annotations

from typing import Any

from numba import types

from llmrun.formats.layouts import records
from llmrun.formats.layouts.kv import BLOCK
from llmrun.formats.layouts.records import offsets
from llmrun.kernels.code import simd
from llmrun.kernels.code.load_store import load_i32, load_i64
from llmrun.kernels.code.work import (
    PRIVATE_INPUT,
    PRIVATE_OUTPUT,
    block_tables,
    first_item,
    n_rows,
    next_item,
    private_row,
)
from llmrun.kernels.compiler import inline_function, kernel
from llmrun.model.plan.ops.convolution import ConvolutionWords

_CONV = offsets(ConvolutionWords)


@inline_function
def _input(op: Any, step: Any, thread: Any, row: Any) -> Any:
    return load_i64(op + _CONV.x) + (row + private_row(op, step, thread, PRIVATE_INPUT)) * load_i64(op + _CONV.x_stride)


@inline_function
def _kept(op: Any, table: Any, position: Any) -> Any:
    """Return the address of the input stored for a position."""
    block = load_i32(table + 4 * (position // BLOCK)) * load_i64(op + _CONV.block_bytes)
    return load_i64(op + _CONV.cache) + block + 4 * load_i64(op + _CONV.width) * (position % BLOCK)


@kernel
def keep(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
    """Store b * y of each row at its position."""
    rows = n_rows(op, step)
    part = 4 * load_i64(op + _CONV.width)
    row = first_item(op, step, thread, n_threads, rows)
    while row < rows:
        b = _input(op, step, thread, row)
        position = load_i32(load_i64(step + records.STEP_POSITIONS) + 4 * row)
        kept = _kept(op, load_i64(block_tables(step, load_i64(op + _CONV.tables)) + 8 * row), position)
        for at in range(0, part, 64):
            y = simd.load_f32x16(b + 2 * part + at)
            simd.store_f32x16(kept + at, simd.multiply(simd.load_f32x16(b + at), y))
        row = next_item(op, step, row, n_threads, rows)


@kernel
def convolve(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
    """Compute c times the sum over all taps, earliest first, of the stored input times the tap's weight."""
    rows = n_rows(op, step)
    part = 4 * load_i64(op + _CONV.width)
    taps = load_i64(op + _CONV.taps)
    y_stride = load_i64(op + _CONV.out_stride)
    y0 = load_i64(op + _CONV.out) + private_row(op, step, thread, PRIVATE_OUTPUT) * y_stride
    row = first_item(op, step, thread, n_threads, rows)
    while row < rows:
        c = _input(op, step, thread, row) + part
        y = y0 + row * y_stride
        table = load_i64(block_tables(step, load_i64(op + _CONV.tables)) + 8 * row)
        first = load_i32(load_i64(step + records.STEP_POSITIONS) + 4 * row) - taps + 1
        for at in range(0, part, 64):
            simd.store_f32x16(y + at, simd.splat(types.float32(0)))
        for tap in range(max(0, -first), taps):  # inputs before the first position are 0
            kept = _kept(op, table, first + tap)
            weight = load_i64(op + _CONV.weight) + tap * part
            for at in range(0, part, 64):
                product = simd.multiply(simd.load_f32x16(kept + at), simd.load_f32x16(weight + at))
                simd.store_f32x16(y + at, simd.add(simd.load_f32x16(y + at), product))
        for at in range(0, part, 64):
            simd.store_f32x16(y + at, simd.multiply(simd.load_f32x16(c + at), simd.load_f32x16(y + at)))
        row = next_item(op, step, row, n_threads, rows)
