"""Distributes an op's work items among threads.

Either every thread processes all items, or each thread processes runs of consecutive items. Runs matter, because
consecutive rows of a sequence are stored in the same cache lines, and a thread finds the rows that it processed in the
previous op in its own cache.
"""

from __future__ import annotations

from typing import Any

from llmrun.kernels.code.load_store import atomic_add, load_i64
from llmrun.kernels.compiler import inline_function
from llmrun.layouts import records

REPLICATED = records.FLAG_REPLICATED
PRIVATE_INPUT = records.FLAG_PRIVATE_INPUT
PRIVATE_OUTPUT = records.FLAG_PRIVATE_OUTPUT
PRIVATE_SECOND = records.FLAG_PRIVATE_SECOND
PRIVATE_THIRD = records.FLAG_PRIVATE_THIRD
_FLAGS = records.OP_FLAGS
_CLAIM = records.OP_CLAIM
_ROWS = records.OP_ROWS
_STEP_REPLICATED = records.STEP_REPLICATED
_STEP_ROWS = records.STEP_ROWS
_STEP_TABLES = records.STEP_TABLES
_RUN = 16  # consecutive items that a thread claims at once
_FEW = 64  # with at most this many items per thread, they are divided equally


@inline_function
def n_rows(op: Any, step: Any) -> Any:
    return load_i64(step + load_i64(op + _ROWS))


@inline_function
def block_tables(step: Any, window: Any) -> Any:
    """Return the address of an int64[rows] that holds the address of each row's block table for a window."""
    return load_i64(step + _STEP_TABLES) + 8 * load_i64(step + _STEP_ROWS) * window


@inline_function
def claim(op: Any) -> Any:
    """Claim the next item of an op whose items are divided among the threads."""
    return atomic_add(load_i64(op + _CLAIM), 1)


@inline_function
def first_item(op: Any, step: Any, thread: Any, n_threads: Any, n_items: Any) -> Any:
    """Return a thread's first item, or at least `n_items` if there is none for it.

    A few items are divided equally. Many items are claimed in runs, because cores may differ in speed.
    """
    if load_i64(step + _STEP_REPLICATED) != 0 and load_i64(op + _FLAGS) & REPLICATED:
        return 0
    if n_items <= _FEW * n_threads:
        return thread * _equal_share(n_threads, n_items)
    return claim(op) * _RUN


@inline_function
def next_item(op: Any, step: Any, item: Any, n_threads: Any, n_items: Any) -> Any:
    """Return the item that the same thread processes after `item`, or at least `n_items` if there is none."""
    item += 1
    if load_i64(step + _STEP_REPLICATED) != 0 and load_i64(op + _FLAGS) & REPLICATED:
        return item
    if n_items <= _FEW * n_threads:
        return item if item % _equal_share(n_threads, n_items) != 0 else n_items
    return item if item % _RUN != 0 else claim(op) * _RUN


@inline_function
def _equal_share(n_threads: Any, n_items: Any) -> Any:
    return (n_items + n_threads - 1) // n_threads


@inline_function
def own_copy(op: Any, step: Any, thread: Any, flag: Any) -> Any:
    """Return the index of this thread's copy of a buffer, or 0 if all threads share the buffer in this step."""
    if load_i64(step + _STEP_REPLICATED) != 0 and load_i64(op + _FLAGS) & flag:
        return thread
    return 0


@inline_function
def private_row(op: Any, step: Any, thread: Any, flag: Any) -> Any:
    """Return the index of the first row of this thread's copy of a buffer. Each copy has as many rows as the op."""
    return own_copy(op, step, thread, flag) * n_rows(op, step)
