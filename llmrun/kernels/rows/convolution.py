"""The gated short convolution of LFM2, over positions kept in the KV cache's blocks.

A block is float32[32 positions, features] of b * y. A row looks back on rows of its own step, which another thread may
have: so first all rows are kept, then, after a barrier, all are convolved. In a step of one row each thread does both,
and all keep the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import types

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
from llmrun.layouts import records
from llmrun.layouts.kv_blocks import BLOCK

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ARG = records.OP_ARGS
# TABLES: number of the window whose block tables are read; WIDTH: of a row, a whole number of vectors; WEIGHT: [taps,
# features].
A_X, A_X_STRIDE, A_CACHE, A_BLOCK_BYTES, A_TABLES, A_WIDTH = (ARG + 8 * i for i in range(6))
A_Y, A_Y_STRIDE, A_WEIGHT, A_TAPS = (ARG + 8 * i for i in range(6, 10))


@inline_function
def _input(op: Any, step: Any, thread: Any, row: Any) -> Any:
    return load_i64(op + A_X) + (row + private_row(op, step, thread, PRIVATE_INPUT)) * load_i64(op + A_X_STRIDE)


@inline_function
def _kept(op: Any, table: Any, position: Any) -> Any:
    """Address of what is kept of a position."""
    block = load_i32(table + 4 * (position // BLOCK)) * load_i64(op + A_BLOCK_BYTES)
    return load_i64(op + A_CACHE) + block + 4 * load_i64(op + A_WIDTH) * (position % BLOCK)


@kernel
def keep(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
    """b * y of each row, at its position."""
    rows = n_rows(op, step)
    part = 4 * load_i64(op + A_WIDTH)
    row = first_item(op, step)
    while row < rows:
        b = _input(op, step, thread, row)
        position = load_i32(load_i64(step + records.STEP_POSITIONS) + 4 * row)
        kept = _kept(op, load_i64(block_tables(step, load_i64(op + A_TABLES)) + 8 * row), position)
        for at in range(0, part, 64):
            y = simd.load_f32x16(b + 2 * part + at)
            simd.store_f32x16(kept + at, simd.multiply(simd.load_f32x16(b + at), y))
        row = next_item(op, step, row)


@kernel
def convolve(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
    """c times the sum over the taps, the earliest first, of what is kept times the tap's weight."""
    rows = n_rows(op, step)
    part = 4 * load_i64(op + A_WIDTH)
    taps = load_i64(op + A_TAPS)
    y_stride = load_i64(op + A_Y_STRIDE)
    y0 = load_i64(op + A_Y) + private_row(op, step, thread, PRIVATE_OUTPUT) * y_stride
    row = first_item(op, step)
    while row < rows:
        c = _input(op, step, thread, row) + part
        y = y0 + row * y_stride
        table = load_i64(block_tables(step, load_i64(op + A_TABLES)) + 8 * row)
        first = load_i32(load_i64(step + records.STEP_POSITIONS) + 4 * row) - taps + 1
        for at in range(0, part, 64):
            simd.store_f32x16(y + at, simd.splat(types.float32(0)))
        for tap in range(max(0, -first), taps):  # before the first position is 0
            kept = _kept(op, table, first + tap)
            weight = load_i64(op + A_WEIGHT) + tap * part
            for at in range(0, part, 64):
                product = simd.multiply(simd.load_f32x16(kept + at), simd.load_f32x16(weight + at))
                simd.store_f32x16(y + at, simd.add(simd.load_f32x16(y + at), product))
        for at in range(0, part, 64):
            simd.store_f32x16(y + at, simd.multiply(simd.load_f32x16(c + at), simd.load_f32x16(y + at)))
        row = next_item(op, step, row)


def convolution_reference(x: NDArray[np.float32], weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """x float32[rows, 3 * width] (b, c, y), all positions of one sequence; weight float32[width, taps]; returns
    float32[rows, width]."""
    import numpy as np

    b, c, y = np.split(x, 3, axis=1)
    width, taps = weight.shape
    kept = np.concatenate([np.zeros((taps - 1, width), np.float32), b * y])
    total = np.zeros_like(y)
    for tap in range(taps):
        total += kept[tap : tap + len(x)] * weight[:, tap]
    result: NDArray[np.float32] = c * total
    return result
