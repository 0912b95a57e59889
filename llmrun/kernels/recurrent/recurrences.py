"""The gated delta rule and the recurrences of Mamba-1 and Mamba-2, computed row by row.

The threads divide the runs of the step, the heads and the columns of the heads' matrices, because no column depends on
another one. A run is the rows of one sequence (layouts/kv.py). A work item applies the rows since the base to its
part of the matrix, and then the rows of the run. Rows after the new base are applied to a copy of the part, so that the
stored part remains that of the new base.

Each row is computed by the same operations in the same order, wherever a step begins, so the result has the same bits
however a prompt is divided into steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types

from llmrun.formats.layouts import kv, records
from llmrun.formats.layouts.records import offsets
from llmrun.kernels.code import curves, simd
from llmrun.kernels.code.load_store import copy_bytes, load_f32, load_i32, load_i64, store_f32
from llmrun.kernels.code.work import (
    PRIVATE_FIFTH,
    PRIVATE_FOURTH,
    PRIVATE_INPUT,
    PRIVATE_SECOND,
    PRIVATE_THIRD,
    first_item,
    next_item,
    private_row,
)
from llmrun.kernels.compiler import inline_function, kernel, kernel_family
from llmrun.kernels.recurrent.matrices import MatrixPart
from llmrun.model.plan.ops.recurrences import RecurrenceWords


@inline_function
def n_runs(step: Any) -> Any:
    return load_i64(step + records.STEP_RUNS)


@inline_function
def run_address(step: Any, run: Any) -> Any:
    """Return the address of a run's words."""
    return load_i64(step + records.STEP_RUN_LIST) + run * kv.RUN_BYTES


@inline_function
def row_of_run(step: Any, run: Any, index: Any) -> Any:
    """Return the index in the step of the run's row `index`. `run` is the address of the run's words."""
    return load_i32(load_i64(step + records.STEP_RUN_ROWS) + 4 * (load_i64(run + kv.RUN_FIRST) + index))


_REC = offsets(RecurrenceWords)


@kernel_family
def delta_rule(level: str, vectors: int) -> Callable[..., None]:
    """Build the kernel of DeltaRule (plan/ops/recurrences.py) for parts with 16 * `vectors` columns."""
    part = MatrixPart(level, vectors)
    zeros, load, store, update = part.zeros, part.load, part.store, part.update
    scaled, scaled_sum, add_product = part.scaled, part.scaled_sum, part.add_product
    fma, sigmoid, decay_of = simd.Operations(level).fma, curves.sigmoid(level), _decay(level)
    row_bytes = 64 * vectors

    @inline_function
    def apply(
        op: Any, head: Any, column: Any, matrix: Any, q: Any, k: Any, v: Any, gate: Any, beta: Any, out: Any
    ) -> None:
        """Apply a row to the part at `matrix`, and store the row's output at `out` unless that is 0.

        The output is computed as decay * (q . S) + (q . k) * change from the S before the row, so that one pass over S
        yields both k . S and q . S.
        """
        key_bytes = 4 * load_i64(op + _REC.key_size)
        decay, _ = decay_of(op, head, gate)
        recalled, asked = zeros(), zeros()
        row = matrix
        for at in range(0, key_bytes, 4):
            recalled = add_product(recalled, k + at, row)
            asked = add_product(asked, q + at, row)
            row += row_bytes
        # change = beta * (v - decay * recalled)
        minus = simd.subtract(simd.splat(types.float32(0)), decay)
        change = scaled(sigmoid(simd.splat(load_f32(beta))), scaled_sum(minus, recalled, load(v)))
        if out != 0:
            products = simd.splat(types.float32(0))
            for at in range(0, key_bytes, 64):
                products = fma(simd.load_f32x16(q + at), simd.load_f32x16(k + at), products)
            alike = simd.splat(simd.sum_lanes(products))
            store(out, scaled_sum(alike, change, scaled(decay, asked)))
        row = matrix
        for at in range(0, key_bytes, 4):
            update(row, decay, k + at, change)
            row += row_bytes

    return _recurrence(apply, vectors, has_beta=True)


@kernel_family
def ssd(level: str, vectors: int) -> Callable[..., None]:
    """Build the kernel of Ssd (plan/ops/recurrences.py) for parts with 16 * `vectors` columns."""
    part = MatrixPart(level, vectors)
    zeros, load, store, update = part.zeros, part.load, part.store, part.update
    scaled, scaled_sum, add_product = part.scaled, part.scaled_sum, part.add_product
    decay_of, row_bytes = _decay(level), 64 * vectors

    @inline_function
    def apply(
        op: Any, head: Any, column: Any, matrix: Any, q: Any, k: Any, v: Any, gate: Any, beta: Any, out: Any
    ) -> None:
        """Apply a row to the part at `matrix`, and store the row's output at `out` unless that is 0."""
        decay, size = decay_of(op, head, gate)
        x = load(v)
        change = scaled(size, x)
        asked = zeros()
        row = matrix
        for at in range(0, 4 * load_i64(op + _REC.key_size), 4):
            update(row, decay, k + at, change)
            asked = add_product(asked, q + at, row)
            row += row_bytes
        if out != 0:
            skip = simd.splat(load_f32(load_i64(op + _REC.skip) + 4 * head))
            store(out, scaled_sum(skip, x, asked))

    return _recurrence(apply, vectors, has_beta=False)


@kernel_family
def selective_scan(level: str) -> Callable[..., None]:
    """Build the kernel of SelectiveScan (plan/ops/recurrences.py) for parts with 16 columns."""
    operations = simd.Operations(level)
    exp, fma, softplus = operations.exp, operations.fma, curves.softplus(level)

    @inline_function
    def apply(
        op: Any, head: Any, column: Any, matrix: Any, q: Any, k: Any, v: Any, gate: Any, beta: Any, out: Any
    ) -> None:
        """Apply a row to the part at `matrix`, and store the row's output at `out` unless that is 0."""
        key_size = load_i64(op + _REC.key_size)
        rates = load_i64(op + _REC.rate) + 4 * key_size * column
        bias = simd.load_f32x16(load_i64(op + _REC.bias) + 4 * column)
        size, x = softplus(simd.add(simd.load_f32x16(gate), bias)), simd.load_f32x16(v)
        change, asked = simd.multiply(size, x), simd.splat(types.float32(0))
        for key in range(key_size):
            decay = exp(simd.multiply(simd.load_f32x16(rates + 64 * key), size))
            decayed = simd.multiply(decay, simd.load_f32x16(matrix + 64 * key))
            total = fma(simd.splat(load_f32(k + 4 * key)), change, decayed)
            simd.store_f32x16(matrix + 64 * key, total)
            asked = fma(simd.splat(load_f32(q + 4 * key)), total, asked)
        if out != 0:
            skip = simd.load_f32x16(load_i64(op + _REC.skip) + 4 * column)
            simd.store_f32x16(out, fma(skip, x, asked))

    return _recurrence(apply, 1, has_beta=False, gate_per_column=True)


def _decay(level: str) -> Any:
    """Return a function that computes a row's decay and step size for a head, each in all lanes of a vector."""
    exp, softplus = simd.Operations(level).exp, curves.softplus(level)

    @inline_function
    def decay(op: Any, head: Any, gate: Any) -> Any:
        size = softplus(simd.splat(load_f32(gate) + load_f32(load_i64(op + _REC.bias) + 4 * head)))
        return exp(simd.multiply(simd.splat(load_f32(load_i64(op + _REC.rate) + 4 * head)), size)), size

    return decay


def _recurrence(apply: Any, vectors: int, *, has_beta: bool, gate_per_column: bool = False) -> Callable[..., None]:
    """Return the kernel that runs `apply` for each row and each part of the heads' matrices.

    There is a gate per head, or one per column of the only head.
    """
    columns = 16 * vectors

    @inline_function
    def remember(op: Any, buffer: Any, k: Any, v: Any, gate: Any, beta: Any, head: Any, column: Any) -> None:
        """Store a row in a replay buffer: the part's values and, for the first part of a head, its gates and key."""
        keys = load_i64(op + _REC.key_heads) * load_i64(op + _REC.key_size)
        gates = keys + load_i64(op + _REC.heads) * load_i64(op + _REC.value_size)
        copy_bytes(buffer + 4 * (keys + column), v, 4 * columns)
        if gate_per_column:
            copy_bytes(buffer + 4 * (gates + column), gate, 4 * columns)
        if column % load_i64(op + _REC.value_size) != 0:
            return
        if not gate_per_column:
            store_f32(buffer + 4 * (gates + head), load_f32(gate))
        if has_beta:
            store_f32(buffer + 4 * (gates + load_i64(op + _REC.heads) + head), load_f32(beta))
        # The first of the heads that share a key head stores the key.
        key_head = head // load_i64(op + _REC.shared) % load_i64(op + _REC.key_heads)
        if head == key_head * load_i64(op + _REC.shared):
            key_bytes = 4 * load_i64(op + _REC.key_size)
            copy_bytes(buffer + key_head * key_bytes, k, key_bytes)

    @inline_function
    def replay(op: Any, buffer: Any, matrix: Any, head: Any, column: Any, written: Any) -> None:
        """Apply the row at `buffer` in a replay buffer, and copy it to `written` in the other one unless that is 0."""
        key_head = head // load_i64(op + _REC.shared) % load_i64(op + _REC.key_heads)
        keys = load_i64(op + _REC.key_heads) * load_i64(op + _REC.key_size)
        gates = keys + load_i64(op + _REC.heads) * load_i64(op + _REC.value_size)
        k, v = buffer + 4 * key_head * load_i64(op + _REC.key_size), buffer + 4 * (keys + column)
        gate = buffer + 4 * (gates + (column if gate_per_column else head))
        beta = gate + 4 * load_i64(op + _REC.heads)
        apply(op, head, column, matrix, k, k, v, gate, beta, 0)
        if written != 0:
            remember(op, written, k, v, gate, beta, head, column)

    @kernel
    def run_kernel(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        heads, value_size = load_i64(op + _REC.heads), load_i64(op + _REC.value_size)
        part_bytes = 4 * load_i64(op + _REC.key_size) * columns
        parts = value_size // columns
        scratch = load_i64(op + _REC.scratch) + thread * load_i64(op + _REC.scratch_bytes)
        q_stride, k_stride, v_stride = (
            load_i64(op + _REC.q_stride),
            load_i64(op + _REC.k_stride),
            load_i64(op + _REC.v_stride),
        )
        gate_stride, beta_stride = load_i64(op + _REC.gate_stride), load_i64(op + _REC.beta_stride)
        q0 = load_i64(op + _REC.q) + private_row(op, step, thread, PRIVATE_INPUT) * q_stride
        k0 = load_i64(op + _REC.k) + private_row(op, step, thread, PRIVATE_SECOND) * k_stride
        v0 = load_i64(op + _REC.v) + private_row(op, step, thread, PRIVATE_THIRD) * v_stride
        gate0 = load_i64(op + _REC.gate) + private_row(op, step, thread, PRIVATE_FOURTH) * gate_stride
        beta0 = load_i64(op + _REC.beta) + private_row(op, step, thread, PRIVATE_FIFTH) * beta_stride
        items = n_runs(step) * heads * parts
        item = first_item(op, step, thread, n_threads, items)
        while item < items:
            run = run_address(step, item // (heads * parts))
            head, column = item // parts % heads, item % (heads * parts) * columns
            key_head = head // load_i64(op + _REC.shared) % load_i64(op + _REC.key_heads)
            key = 4 * key_head * load_i64(op + _REC.key_size)
            start, commit = load_i64(run + kv.RUN_START), load_i64(run + kv.RUN_COMMIT)
            sequence = load_i64(run + kv.RUN_SEQUENCE)
            state = load_i64(op + _REC.state) + sequence * load_i64(op + _REC.state_bytes)
            matrix = state + item % (heads * parts) * part_bytes
            buffers = state + heads * parts * part_bytes
            buffer_bytes = kv.REPLAY_ROWS * load_i64(op + _REC.row_bytes)
            buffer = load_i64(run + kv.RUN_BUFFER)
            if load_i64(run + kv.RUN_BASE) == 0:
                for at in range(0, part_bytes, 64):
                    simd.store_f32x16(matrix + at, simd.splat(types.float32(0)))
            kept = buffers + buffer * buffer_bytes
            written = buffers + (1 - buffer) * buffer_bytes
            for position in range(load_i64(run + kv.RUN_BASE), start):
                if position == commit:
                    copy_bytes(scratch, matrix, part_bytes)
                    matrix = scratch
                if position >= commit:
                    replay(op, kept, matrix, head, column, written)
                    written += load_i64(op + _REC.row_bytes)
                else:
                    replay(op, kept, matrix, head, column, 0)
                kept += load_i64(op + _REC.row_bytes)
            for index in range(load_i64(run + kv.RUN_ROWS)):
                if start + index == commit:
                    copy_bytes(scratch, matrix, part_bytes)
                    matrix = scratch
                row = row_of_run(step, run, index)
                k = k0 + row * k_stride + key
                v = v0 + row * v_stride + 4 * column
                gate = gate0 + row * gate_stride + 4 * (column if gate_per_column else head)
                beta = beta0 + row * beta_stride + 4 * head
                out = load_i64(op + _REC.out) + row * load_i64(op + _REC.out_stride) + 4 * column
                apply(op, head, column, matrix, q0 + row * q_stride + key, k, v, gate, beta, out)
                if start + index >= commit:
                    remember(op, written, k, v, gate, beta, head, column)
                    written += load_i64(op + _REC.row_bytes)
            item = next_item(op, step, item, n_threads, items)

    return run_kernel
