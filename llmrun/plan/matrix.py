"""Weight matrices as a plan names them: bytes of the model's file that are read when they are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from llmrun.layouts.packed_types import FLOAT_BYTES, PACKED_TYPES, WIDE, WIDENED_TYPES, packed_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

SUPPORTED = frozenset(PACKED_TYPES) - {WIDE} | WIDENED_TYPES | frozenset(FLOAT_BYTES)

# Fills uint8[n] with the bytes of a matrix from an offset on, from any thread.
ReadInto = Callable[[int, "NDArray[np.uint8]"], None]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix in the file, whose bytes are read when they are needed."""

    name: str
    kind: str  # "q4_1": the weight type's name in lower case
    rows: int  # outputs
    columns: int  # inputs
    n_bytes: int
    read_into: ReadInto

    @classmethod
    def of_bytes(cls, name: str, kind: str, rows: int, columns: int, data: NDArray[np.uint8]) -> Self:
        """A matrix that is in memory: `data` uint8[rows * row bytes]."""

        def copy(start: int, into: NDArray[np.uint8]) -> None:
            into[:] = data[start : start + len(into)]

        return cls(name, kind, rows, columns, data.size, copy)

    def part(self, first: int, rows: int) -> Matrix:
        """Some of its rows, as a matrix of its own."""
        name, start = f"{self.name}[{first}:{first + rows}]", first * self.row_bytes

        def read_into(offset: int, into: NDArray[np.uint8]) -> None:
            self.read_into(start + offset, into)

        return Matrix(name, self.kind, rows, self.columns, rows * self.row_bytes, read_into)

    def part_of_each(self, n: int, first: int, rows: int) -> Matrix:
        """Some rows of each of `n` equal parts, as a matrix of its own."""
        name = f"{self.name}[each {first}:{first + rows}]"
        whole, start, size = self.n_bytes // n, first * self.row_bytes, rows * self.row_bytes

        def read_into(offset: int, into: NDArray[np.uint8]) -> None:
            done = 0
            while done < into.size:
                part, within = divmod(offset + done, size)
                count = min(size - within, into.size - done)
                self.read_into(part * whole + start + within, into[done : done + count])
                done += count

        return Matrix(name, self.kind, n * rows, self.columns, n * size, read_into)

    def read(self) -> NDArray[np.uint8]:
        """uint8[rows, row bytes], all of it."""
        data = np.empty(self.n_bytes, np.uint8)
        self.read_into(0, data)
        return data.reshape(self.rows, -1)

    @property
    def row_bytes(self) -> int:
        return self.n_bytes // self.rows

    @property
    def is_integer(self) -> bool:
        return self.packed in PACKED_TYPES

    @property
    def packed(self) -> str:
        """How the kernels hold it: a name of PACKED_TYPES, or a float type's."""
        return packed_name(self.kind)
