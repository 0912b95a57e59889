"""Distributes the active experts' matrices among threads. Each work item is a chunk of one expert's groups."""

from __future__ import annotations

from typing import Any, NamedTuple

from llmrun.formats.layouts import records
from llmrun.formats.layouts.experts import HEAD_ACTIVE, HEAD_EXPERTS
from llmrun.kernels.code.load_store import load_i32, load_i64
from llmrun.kernels.code.work import PRIVATE_INPUT, n_rows, own_copy
from llmrun.kernels.compiler import inline_function
from llmrun.model.plan.ops.linear import FloatWords, IntegerWords


class ExpertItems(NamedTuple):
    """Inline functions that tell kernels what work an item consists of."""

    head_of: Any
    n_items: Any
    expert_of: Any
    source_of: Any
    numbers_at: Any


def expert_items(words: IntegerWords | FloatWords) -> ExpertItems:
    """Return the functions for a kernel whose op record has the word offsets `words`."""
    a_head, a_head_bytes, a_numbers, a_own_rows = words.tables, words.tables_bytes, words.row_numbers, words.own_rows
    a_chunk, a_groups = words.chunk, words.groups

    @inline_function
    def head_of(op: Any, step: Any, thread: Any) -> Any:
        copy = 0
        if load_i64(step + records.STEP_REPLICATED) != 0:
            copy = thread
        return load_i64(op + a_head) + copy * load_i64(op + a_head_bytes)

    @inline_function
    def n_items(op: Any, head: Any) -> Any:
        chunk = load_i64(op + a_chunk)
        return load_i64(head + HEAD_ACTIVE) * ((load_i64(op + a_groups) + chunk - 1) // chunk)

    @inline_function
    def expert_of(op: Any, head: Any, item: Any) -> Any:
        """Return (expert, its first slot, the end of its slots, the first group of the item, the end of its groups)."""
        chunk, groups = load_i64(op + a_chunk), load_i64(op + a_groups)
        n_chunks = (groups + chunk - 1) // chunk
        at = head + HEAD_EXPERTS + 8 * (item // n_chunks)
        start = item % n_chunks * chunk
        return load_i32(at), load_i32(at + 4), load_i32(at + 12), start, min(start + chunk, groups)

    @inline_function
    def numbers_at(op: Any, slot: Any) -> Any:
        """Return the address of the indices of x's rows, starting at a slot. They are not used in a step of one row."""
        return load_i64(op + a_numbers) + 4 * slot

    @inline_function
    def source_of(op: Any, step: Any, thread: Any, slot: Any) -> Any:
        """Return the index of the row of x that belongs to a slot."""
        if load_i64(step + records.STEP_REPLICATED) == 0:
            return load_i32(numbers_at(op, slot))
        copy = own_copy(op, step, thread, PRIVATE_INPUT)
        if load_i64(op + a_own_rows) != 0:
            return copy * n_rows(op, step) + slot
        return copy

    return ExpertItems(head_of, n_items, expert_of, source_of, numbers_at)
