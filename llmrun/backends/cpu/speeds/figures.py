"""Data types for the measured speeds of ops. speeds/ops.py does the measuring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from llmrun.model.plan.kv_shapes import AttentionShape

WIDTHS = (512, 2048, 8192)


@dataclass(frozen=True, slots=True)
class LinearSpeed:
    """The speed of matrix products with one weight type.

    read      bytes of weights read per second with a single row
    op        fixed cost of an op in seconds, including its barrier
    multiply  multiply-adds per second with many rows, for each number of columns in WIDTHS
    """

    read: float
    op: float
    multiply: tuple[float, ...]

    def products(self, columns: int) -> float:
        """Return the multiply-adds per second for rows with this many columns."""
        return between(columns, self.multiply)


@dataclass(frozen=True, slots=True)
class RowSpeed:
    """The speed of a row-wise op for each row width in WIDTHS.

    one   seconds for a single row
    many  seconds per row in a step with many rows
    """

    one: tuple[float, ...]
    many: tuple[float, ...]

    def seconds(self, rows: int, width: int) -> float:
        return between(width, self.one) if rows == 1 else rows * between(width, self.many)

    def shared_seconds(self, rows: int, width: int) -> float:
        """Return the time in seconds for rows that are wide enough to be split between threads.

        A single row then takes as long per feature as a row of a step with many rows.
        """
        return rows * width * self.many[-1] / WIDTHS[-1]


@dataclass(frozen=True, slots=True)
class AttentionSpeed:
    """The speed of attention for one attention shape and one KV cache type.

    op          seconds for one row with an empty context
    read        bytes of keys and values per second, for one row
    multiply    multiply-adds per second, for many rows
    rope_one    seconds to rotate and store a single row, per feature of queries, keys and values
    rope_many   seconds to rotate and store a row in a step with many rows, per feature
    step        seconds per step spent outside the ops, on waking the threads and waiting for them
    """

    op: float
    read: float
    multiply: float
    rope_one: float
    rope_many: float
    step: float


def between(width: int, values: Sequence[float]) -> float:
    """Interpolate values measured at WIDTHS, linearly in the logarithm of the width. Clamps at both ends."""
    return float(np.interp(log2(width), [log2(one) for one in WIDTHS], values))


class SpeedTable(Protocol):
    """The measured speeds for one machine and number of threads."""

    def linear(self, packed: str) -> LinearSpeed:
        """Return the speed of matrix products with weights in the given packed form (Matrix.packed)."""

    def rows(self, name: str) -> RowSpeed:
        """Return the speed of "rmsnorm", "swiglu" or "quantize"."""

    def attention(self, shape: AttentionShape, kv_type: str) -> AttentionSpeed:
        """Return the speed of one layer of this shape."""

    def read_bandwidth(self) -> float:
        """Return the memory bandwidth of all threads together, in bytes per second."""
