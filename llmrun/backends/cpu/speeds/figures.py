"""The figures that a machine's ops are measured at. speeds/ops.py measures them."""

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

    read      bytes of weights a second, for one row
    op        seconds an op takes besides, its barrier included
    multiply  multiply-adds a second, for many rows, at each of WIDTHS columns
    """

    read: float
    op: float
    multiply: tuple[float, ...]

    def products(self, columns: int) -> float:
        """Multiply-adds a second with rows of so many columns."""
        return between(columns, self.multiply)


@dataclass(frozen=True, slots=True)
class RowSpeed:
    """The speed of a row-wise op: seconds for one row, and per row of many, at each of WIDTHS."""

    one: tuple[float, ...]
    many: tuple[float, ...]

    def seconds(self, rows: int, width: int) -> float:
        return between(width, self.one) if rows == 1 else rows * between(width, self.many)

    def shared_seconds(self, rows: int, width: int) -> float:
        """Return the seconds of rows so wide that threads share even one: the time per feature is that of many rows."""
        return rows * width * self.many[-1] / WIDTHS[-1]


@dataclass(frozen=True, slots=True)
class AttentionSpeed:
    """The speed of attention for one shape of heads and one type of cache.

    op          seconds for one row with nothing before it
    read        bytes of keys and values a second, for one row
    multiply    multiply-adds a second, for many rows
    rope_one    seconds to rotate and store one row, a feature of queries, keys and values
    rope_many   the same of a row of many
    step        seconds that a step takes besides its ops: waking the threads, and who waits for them
    """

    op: float
    read: float
    multiply: float
    rope_one: float
    rope_many: float
    step: float


def between(width: int, values: Sequence[float]) -> float:
    """Interpolate what was measured at WIDTHS by the width's logarithm; beyond the ends, the end's value holds."""
    return float(np.interp(log2(width), [log2(one) for one in WIDTHS], values))


class SpeedTable(Protocol):
    """The figures of one machine and number of threads."""

    def linear(self, packed: str) -> LinearSpeed:
        """Return the speed of products with weights in a packed form (Matrix.packed)."""

    def rows(self, name: str) -> RowSpeed:
        """Return the speed of "rmsnorm", "swiglu" or "quantize"."""

    def attention(self, shape: AttentionShape, kv_type: str) -> AttentionSpeed:
        """Return the speed of one layer of that shape."""

    def read_bandwidth(self) -> float:
        """Bytes a second from memory, all threads together."""
