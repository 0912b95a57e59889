"""Where the tables of a routing lie: which experts the rows of a step are sent to, and in what order the rows of CHOSEN
values, "slots", are: by expert, and by row where that is the same.

    head     the experts that are chosen, by number, each with its first slot (below)
    chosen   int32[rows, used]: the experts of a row, in order of their probability
    slots    int32[rows, used]: where each of them has the row
    weights  float32[rows, used]
    sources  int32[slots]: the row of each
    experts  int32[slots]: the expert of each

In a step of one row every thread has a head and a row of its own of each table. Rows are padded to whole vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.layouts.arena import round_up
from llmrun.layouts.records import CACHE_LINE, WORD

_NUMBER = 4  # bytes

# How routing.py's kernel is told a Gating; and the least that weights are divided by.
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = range(3)
LEAST_SUM = 2.0**-14

# --- the head of a thread ---------------------------------------------------------------------------------------------
HEAD_ACTIVE = 0  # int64: experts that are chosen
HEAD_EXPERTS = WORD  # int32[active + 1, 2]: an expert, and its first slot; last nothing, and the number of slots


@dataclass(frozen=True, slots=True)
class Tables:
    """Addresses, and sizes in bytes. `next_slots` int32[experts], of each head, is for making the tables."""

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
    """Whole cache lines. `max_rows`: at least as many as threads."""
    return n_threads * _head_bytes(experts) + 5 * max_rows * _row_bytes(used)


def _head_bytes(experts: int) -> int:
    return round_up(HEAD_EXPERTS + _NUMBER * (2 * (experts + 1) + experts), CACHE_LINE)


def _row_bytes(used: int) -> int:
    return round_up(_NUMBER * used, CACHE_LINE)
