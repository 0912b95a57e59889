"""Slices and concatenations of rows, both of which copy parts of rows.

They are cheap, so in a step of one row every thread copies the whole row (records.py).
"""

from __future__ import annotations

from typing import Any

from llmrun.formats.layouts.records import offsets
from llmrun.kernels.code.load_store import copy_bytes, load_i64
from llmrun.kernels.code.work import (
    PRIVATE_INPUT,
    PRIVATE_OUTPUT,
    PRIVATE_SECOND,
    first_item,
    n_rows,
    next_item,
    private_row,
)
from llmrun.kernels.compiler import kernel
from llmrun.model.plan.ops.rows import ConcatWords

_CONCAT = offsets(ConcatWords)


@kernel
def concat(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
    """Write the parts of each row.

    Part i consists of `a_bytes` bytes from `a + i * a_step`, then `b_bytes` bytes from `b + i * b_step`.
    """
    rows, parts = n_rows(op, step), load_i64(op + _CONCAT.parts)
    a_stride, a_step = load_i64(op + _CONCAT.a_stride), load_i64(op + _CONCAT.a_step)
    a_bytes = load_i64(op + _CONCAT.a_bytes)
    b_stride, b_step = load_i64(op + _CONCAT.b_stride), load_i64(op + _CONCAT.b_step)
    b_bytes = load_i64(op + _CONCAT.b_bytes)
    stride = load_i64(op + _CONCAT.out_stride)
    a0 = load_i64(op + _CONCAT.a) + private_row(op, step, thread, PRIVATE_INPUT) * a_stride
    b0 = load_i64(op + _CONCAT.b) + private_row(op, step, thread, PRIVATE_SECOND) * b_stride
    out0 = load_i64(op + _CONCAT.out) + private_row(op, step, thread, PRIVATE_OUTPUT) * stride
    row = first_item(op, step, thread, n_threads, rows)
    while row < rows:
        to = out0 + row * stride
        for part in range(parts):
            copy_bytes(to, a0 + row * a_stride + part * a_step, a_bytes)
            copy_bytes(to + a_bytes, b0 + row * b_stride + part * b_step, b_bytes)
            to += a_bytes + b_bytes
        row = next_item(op, step, row, n_threads, rows)
