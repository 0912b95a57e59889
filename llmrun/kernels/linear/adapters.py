"""The products of LoRA adapters: `reduce` multiplies rows by A, and `expand` multiplies the result by B.

`look_up` takes the place of `reduce` for embeddings. All of them skip rows whose scale is 0. The sums have the same
order as in floats.py, and the products of several adapters are added one after the other, so the result of a row does
not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types

from llmrun.formats.layouts import records
from llmrun.formats.layouts.records import (
    BLOCK_ROWS,
    EXPAND_GROUPS,
    UNIT_ADAPTER,
    UNIT_BYTES,
    UNIT_COLUMNS,
    UNIT_FACTOR,
    UNIT_GROUP_BYTES,
    UNIT_OFFSET,
    UNIT_WEIGHTS,
    offsets,
)
from llmrun.kernels.code import simd
from llmrun.kernels.code.load_store import load_f32, load_i32, load_i64, store_f32
from llmrun.kernels.code.work import PRIVATE_INPUT, claim, n_rows, private_row
from llmrun.kernels.compiler import inline_function, kernel, kernel_family
from llmrun.kernels.linear.floats import float_tile
from llmrun.model.plan.ops.adapters import LowRankWords

_WORDS = offsets(LowRankWords)


@inline_function
def _step_row(op: Any, step: Any, row: Any) -> Any:
    """Return the index in the step of a row of the op."""
    if load_i64(op + _WORDS.wanted) != 0:
        return load_i32(load_i64(step + records.STEP_WANTED_ROWS) + 4 * row)
    return row


@inline_function
def _scale(op: Any, step: Any, row: Any, unit: Any) -> Any:
    """Return the scale of a unit's adapter for a row of the op, or 0 if no row of the step uses an adapter."""
    scales = load_i64(step + records.STEP_SCALES)
    if scales == 0:
        return types.float32(0)
    index = _step_row(op, step, row) * load_i64(op + _WORDS.n_adapters) + load_i64(unit + UNIT_ADAPTER)
    return load_f32(scales + 4 * index)


@kernel_family
def reduce(level: str) -> Callable[..., None]:
    """Build the kernel that computes out = scale * factor * (A x). A unit is 16 features of one adapter's product."""
    zero, add_columns, store = float_tile(level, "f32", 1)

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows, columns = n_rows(op, step), load_i64(op + _WORDS.columns)
        x_stride = load_i64(op + _WORDS.x_stride)
        x0 = load_i64(op + _WORDS.x) + private_row(op, step, thread, PRIVATE_INPUT) * x_stride
        blocks = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS
        items = load_i64(op + _WORDS.n_units) * blocks
        item = claim(op)
        while item < items:
            unit = load_i64(op + _WORDS.units) + item // blocks * UNIT_BYTES
            weights = load_i64(unit + UNIT_WEIGHTS)
            first = item % blocks * BLOCK_ROWS
            for row in range(first, min(first + BLOCK_ROWS, rows)):
                scale = _scale(op, step, row, unit)
                if scale != types.float32(0):
                    tile = zero()
                    for column in range(0, columns, 4):
                        tile = add_columns(tile, weights + 64 * column, x0 + row * x_stride + 4 * column, 0)
                    low = load_i64(op + _WORDS.out) + row * load_i64(op + _WORDS.out_stride)
                    low += load_i64(unit + UNIT_OFFSET)
                    store(tile, low, 0, 0)
                    factor = simd.splat(scale * load_f32(unit + UNIT_FACTOR))
                    simd.store_f32x16(low, simd.multiply(simd.load_f32x16(low), factor))
            item = claim(op)

    return run


@kernel
def look_up(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
    """Compute out = scale * factor * A[token]. A unit is an adapter."""
    rows, n_units = n_rows(op, step), load_i64(op + _WORDS.n_units)
    item = claim(op)
    while item < n_units * rows:
        row = item % rows
        unit = load_i64(op + _WORDS.units) + item // rows * UNIT_BYTES
        scale = _scale(op, step, row, unit)
        if scale != types.float32(0):
            token = load_i32(load_i64(step + records.STEP_TOKENS) + 4 * row)
            group = load_i64(unit + UNIT_WEIGHTS) + token // 16 * load_i64(unit + UNIT_GROUP_BYTES)
            low = load_i64(op + _WORDS.out) + row * load_i64(op + _WORDS.out_stride) + load_i64(unit + UNIT_OFFSET)
            factor = scale * load_f32(unit + UNIT_FACTOR)
            for column in range(load_i64(unit + UNIT_COLUMNS)):
                store_f32(low + 4 * column, load_f32(group + 4 * (16 * column + token % 16)) * factor)
        item = claim(op)


@kernel_family
def expand(level: str) -> Callable[..., None]:
    """Build the kernel that computes out += B x, where x has the results of `reduce`. A unit is an adapter."""
    zero, add_columns, store = float_tile(level, "f32", 1)

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows, n_groups, n_units = n_rows(op, step), load_i64(op + _WORDS.n_groups), load_i64(op + _WORDS.n_units)
        x_stride, y_stride = load_i64(op + _WORDS.x_stride), load_i64(op + _WORDS.out_stride)
        y0 = load_i64(op + _WORDS.out)
        if load_i64(op + _WORDS.logits) != 0:
            y0 = load_i64(step + records.STEP_LOGITS)
        blocks = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS
        items = (n_groups + EXPAND_GROUPS - 1) // EXPAND_GROUPS * blocks
        item = claim(op)
        while item < items:
            first_group, first = item // blocks * EXPAND_GROUPS, item % blocks * BLOCK_ROWS
            for row in range(first, min(first + BLOCK_ROWS, rows)):
                for index in range(n_units):
                    unit = load_i64(op + _WORDS.units) + index * UNIT_BYTES
                    if _scale(op, step, row, unit) != types.float32(0):
                        low = load_i64(op + _WORDS.x) + row * x_stride + load_i64(unit + UNIT_OFFSET)
                        for group in range(first_group, min(first_group + EXPAND_GROUPS, n_groups)):
                            base = load_i64(unit + UNIT_WEIGHTS) + group * load_i64(unit + UNIT_GROUP_BYTES)
                            tile = zero()
                            for column in range(0, load_i64(unit + UNIT_COLUMNS), 4):
                                tile = add_columns(tile, base + 64 * column, low + 4 * column, 0)
                            store(tile, y0 + row * y_stride + 64 * group, y_stride, 1)
            item = claim(op)

    return run
