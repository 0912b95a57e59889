"""Computes which chunks the rows of a step need, and which slots their partial results are stored in.

A slot holds the states of all heads for one row and one chunk. Slots are ordered by row, and the slots of a row by
position.
"""

from __future__ import annotations

from typing import Any

from llmrun.kernels.code.load_store import load_i32
from llmrun.kernels.compiler import inline_function
from llmrun.layouts.attention import CHUNK, SPLIT_ROWS


@inline_function
def first_chunk(positions: Any, row: Any, window: Any) -> Any:
    """Return the index of the first chunk that a row needs if it attends to the last `window` positions."""
    return max(load_i32(positions + 4 * row) + 1 - window, 0) // CHUNK


@inline_function
def end_chunk(positions: Any, row: Any) -> Any:
    """Return the index after the last chunk that a row needs."""
    return load_i32(positions + 4 * row) // CHUNK + 1


@inline_function
def slots_before(positions: Any, row: Any, window: Any) -> Any:
    """Return the number of slots of all rows before `row`."""
    slots = 0
    for earlier in range(row):
        slots += end_chunk(positions, earlier) - first_chunk(positions, earlier, window)
    return slots


@inline_function
def slots_of_step(positions: Any, rows: Any, window: Any, most: Any) -> Any:
    """Return the number of slots of a step, or 0 if the step is not split over chunks.

    A step is split unless it has too many rows, or needs more than `most` slots.
    """
    if rows > SPLIT_ROWS:
        return 0
    slots = slots_before(positions, rows, window)
    return slots if slots <= most else 0


@inline_function
def row_of_slot(positions: Any, slot: Any, window: Any) -> Any:
    """Return the row of a slot."""
    row = 0
    end = end_chunk(positions, 0) - first_chunk(positions, 0, window)
    while slot >= end:
        row += 1
        end += end_chunk(positions, row) - first_chunk(positions, row, window)
    return row
