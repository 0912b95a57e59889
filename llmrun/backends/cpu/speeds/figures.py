"""The measured speeds of a machine's ops. speeds/ops.py does the measuring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from llmrun.plan.kv_shapes import AttentionShape

WIDTHS = (512, 2048, 8192)


@dataclass(frozen=True, slots=True)
class LinearSpeed:
    """The speed of one weight type.

    read      bytes of weights per second, for one row
    op        fixed cost of an op in seconds, including its barrier
    multiply  multiply-adds per second for many rows, for each number of columns in WIDTHS
    """

    read: float
    op: float
    multiply: tuple[float, ...]

    def products(self, columns: int) -> float:
        """Return the multiply-adds per second for rows of this many columns."""
        return between(columns, self.multiply)


@dataclass(frozen=True, slots=True)
class RowSpeed:
    """The speed of a row-wise op: seconds for a single row, and seconds per row for many, at each of WIDTHS."""

    one: tuple[float, ...]
    many: tuple[float, ...]

    def seconds(self, rows: int, width: int) -> float:
        return between(width, self.one) if rows == 1 else rows * between(width, self.many)

    def shared_seconds(self, rows: int, width: int) -> float:
        """Return the seconds for rows wide enough to be split between threads.

        The time per feature is then that of many rows, even for a single row.
        """
        return rows * width * self.many[-1] / WIDTHS[-1]


@dataclass(frozen=True, slots=True)
class AttentionSpeed:
    """The speed of attention for one attention shape and one KV cache type.

    op          seconds for one row with an empty context
    read        bytes of keys and values per second, for one row
    multiply    multiply-adds per second, for many rows
    rope_one    seconds per feature of queries, keys and values to rotate and store a single row
    rope_many   the same per row when there are many rows
    step        seconds of a step outside its ops, for waking the threads and waiting for them
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
        """Return the speed of products with weights in the given packed form (Matrix.packed)."""

    def rows(self, name: str) -> RowSpeed:
        """Return the speed of "rmsnorm", "swiglu" or "quantize"."""

    def attention(self, shape: AttentionShape, kv_type: str) -> AttentionSpeed:
        """Return the speed of one layer of this shape."""

    def read_bandwidth(self) -> float:
        """Return the bytes per second that all threads together read from memory."""
