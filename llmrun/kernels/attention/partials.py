"""Computes which chunks the rows of a step need, and which slots their partial results are stored in.

A slot holds the states of all heads for one row and one chunk. Slots are ordered by row, and the slots of a row by
position. `ranges` is the address of the positions that each row attends to, int32[rows, 2]: the first, and the one
after the last.
"""

from __future__ import annotations

from typing import Any

from llmrun.formats.layouts.kv import CHUNK, SPLIT_ROWS
from llmrun.kernels.code.load_store import load_i32
from llmrun.kernels.compiler import inline_function


@inline_function
def first_seen(ranges: Any, row: Any) -> Any:
    """Return the first position that a row attends to."""
    return load_i32(ranges + 8 * row)


@inline_function
def end_seen(ranges: Any, row: Any) -> Any:
    """Return the position after the last one that a row attends to."""
    return load_i32(ranges + 8 * row + 4)


@inline_function
def first_chunk(ranges: Any, row: Any) -> Any:
    """Return the index of the first chunk that a row needs."""
    return first_seen(ranges, row) // CHUNK


@inline_function
def end_chunk(ranges: Any, row: Any) -> Any:
    """Return the index after the last chunk that a row needs."""
    return (end_seen(ranges, row) - 1) // CHUNK + 1


@inline_function
def seen_of_chunk(ranges: Any, row: Any, chunk: Any) -> Any:
    """Return the range of a chunk's positions that a row attends to. The range may be empty."""
    start = chunk * CHUNK
    return max(first_seen(ranges, row) - start, 0), min(end_seen(ranges, row) - start, CHUNK)


@inline_function
def seen_by_any(ranges: Any, rows: Any, chunk: Any) -> Any:
    """Return the smallest range of a chunk's positions that contains the ranges of all `rows` rows."""
    first, end = seen_of_chunk(ranges, 0, chunk)
    for row in range(1, rows):
        row_first, row_end = seen_of_chunk(ranges, row, chunk)
        first, end = min(first, row_first), max(end, row_end)
    return first, end


@inline_function
def slots_before(ranges: Any, row: Any) -> Any:
    """Return the number of slots of all rows before `row`."""
    slots = 0
    for earlier in range(row):
        slots += end_chunk(ranges, earlier) - first_chunk(ranges, earlier)
    return slots


@inline_function
def slots_of_step(ranges: Any, rows: Any, most: Any) -> Any:
    """Return the number of slots of a step, or 0 if the step is not split over chunks.

    A step is split unless it has too many rows, or needs more than `most` slots.
    """
    if rows > SPLIT_ROWS:
        return 0
    slots = slots_before(ranges, rows)
    return slots if slots <= most else 0


@inline_function
def row_of_slot(ranges: Any, slot: Any) -> Any:
    """Return the row of a slot."""
    row = 0
    end = end_chunk(ranges, 0) - first_chunk(ranges, 0)
    while slot >= end:
        row += 1
        end += end_chunk(ranges, row) - first_chunk(ranges, row)
    return row
