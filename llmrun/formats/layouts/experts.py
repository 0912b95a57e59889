"""The routing tables of mixtures of experts, which say which experts process which rows of a step.

A "slot" is a pair of a row and one of its experts. Slots
are sorted by expert, then by row.

    head     the active experts, sorted by index, each with its first slot (see below)
    chosen   int32[rows, used]: the experts of each row, most probable first
    slots    int32[rows, used]: the slot of each pair of row and expert
    weights  float32[rows, used]: the weight that the row gives to each expert
    sources  int32[slots]: the row of each slot
    experts  int32[slots]: the expert of each slot

In a step of one row, every thread has its own head and its own row of each table. Rows are padded to whole cache lines.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.formats.layouts.arena import round_up
from llmrun.formats.layouts.records import CACHE_LINE, WORD

_NUMBER = 4  # bytes of an int32

# The values of Gating as the kernel in routing.py receives them, and the smallest divisor for normalizing weights.
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = range(3)
LEAST_SUM = 2.0**-14

# --- the head of a thread ---------------------------------------------------------------------------------------------
HEAD_ACTIVE = 0  # int64: the number of active experts
HEAD_EXPERTS = WORD  # int32[active + 1, 2]: (expert, its first slot); the last entry contains the number of slots


@dataclass(frozen=True, slots=True)
class Tables:
    """The addresses of the tables, and their sizes in bytes.

    `next_slots`, an int32[experts] in every head, is scratch memory for filling the tables.
    """

    head: int
    head_bytes: int
    next_slots: int
    chosen: int
    slots: int
    weights: int
    sources: int
    experts: int
    row_bytes: int

    @classmethod
    def at(cls, address: int, experts: int, used: int, max_rows: int, n_threads: int) -> Tables:
        head_bytes, row_bytes = _head_bytes(experts), _row_bytes(used)
        first = address + n_threads * head_bytes
        chosen, slots, weights, sources, numbers = (first + index * max_rows * row_bytes for index in range(5))
        next_slots = HEAD_EXPERTS + 2 * _NUMBER * (experts + 1)
        return cls(address, head_bytes, next_slots, chosen, slots, weights, sources, numbers, row_bytes)


def tables_bytes(experts: int, used: int, max_rows: int, n_threads: int) -> int:
    """Return the size of all tables in bytes, in whole cache lines. `max_rows` must be at least `n_threads`."""
    return n_threads * _head_bytes(experts) + 5 * max_rows * _row_bytes(used)


def _head_bytes(experts: int) -> int:
    return round_up(HEAD_EXPERTS + _NUMBER * (2 * (experts + 1) + experts), CACHE_LINE)


def _row_bytes(used: int) -> int:
    return round_up(_NUMBER * used, CACHE_LINE)
