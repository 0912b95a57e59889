"""Parts of rows: some taken out, some put together.

Cheap, so in a step of one row every thread does it for itself (records.py).
"""

from __future__ import annotations

from typing import Any

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
from llmrun.layouts import records

ARG = records.OP_ARGS

A_A, A_A_STRIDE, A_A_STEP, A_A_BYTES = (ARG + 8 * i for i in range(4))
A_B, A_B_STRIDE, A_B_STEP, A_B_BYTES = (ARG + 8 * i for i in range(4, 8))
A_JOINED, A_JOINED_STRIDE, A_PARTS = (ARG + 8 * i for i in range(8, 11))


@kernel
def join(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
    """Each part of a row: some bytes of a, then some of b, each a step further than for the part before it."""
    rows, parts = n_rows(op, step), load_i64(op + A_PARTS)
    a_stride, a_step, a_bytes = load_i64(op + A_A_STRIDE), load_i64(op + A_A_STEP), load_i64(op + A_A_BYTES)
    b_stride, b_step, b_bytes = load_i64(op + A_B_STRIDE), load_i64(op + A_B_STEP), load_i64(op + A_B_BYTES)
    stride = load_i64(op + A_JOINED_STRIDE)
    a0 = load_i64(op + A_A) + private_row(op, step, thread, PRIVATE_INPUT) * a_stride
    b0 = load_i64(op + A_B) + private_row(op, step, thread, PRIVATE_SECOND) * b_stride
    joined0 = load_i64(op + A_JOINED) + private_row(op, step, thread, PRIVATE_OUTPUT) * stride
    row = first_item(op, step)
    while row < rows:
        to = joined0 + row * stride
        for part in range(parts):
            copy_bytes(to, a0 + row * a_stride + part * a_step, a_bytes)
            copy_bytes(to + a_bytes, b0 + row * b_stride + part * b_step, b_bytes)
            to += a_bytes + b_bytes
        row = next_item(op, step, row)
