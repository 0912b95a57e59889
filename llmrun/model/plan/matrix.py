"""The weight matrices of a plan. Their bytes stay in the model file until they are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from llmrun.formats.layouts.linear import FLOAT_BYTES, PACKED_TYPES, WIDE, WIDENED_TYPES, packed_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

SUPPORTED = frozenset(PACKED_TYPES) - {WIDE} | WIDENED_TYPES | frozenset(FLOAT_BYTES)

# A function that fills a uint8[n] array with n bytes of a matrix, starting at an offset into the matrix. It can be
# called from any thread.
ReadInto = Callable[[int, "NDArray[np.uint8]"], None]


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a matrix that another matrix consists of: `rows` rows of each of its `n` parts, from `first` on."""

    whole: Matrix
    n: int
    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix in the file, or a part of one. Its bytes are read on demand."""

    name: str
    kind: str  # the name of the weight type in lower case, for example "q4_1"
    rows: int  # number of outputs
    columns: int  # number of inputs
    n_bytes: int
    read_into: ReadInto
    cut: Cut | None = None  # None if this is not a part of another matrix

    @classmethod
    def of_bytes(cls, name: str, kind: str, rows: int, columns: int, data: NDArray[np.uint8]) -> Self:
        """Wrap a matrix that is already in memory: `data` is uint8[rows * row bytes]."""

        def copy(start: int, into: NDArray[np.uint8]) -> None:
            into[:] = data[start : start + len(into)]

        return cls(name, kind, rows, columns, data.size, copy)

    def part(self, first: int, rows: int) -> Matrix:
        """Return `rows` consecutive rows, starting at `first`, as a matrix."""
        name, start = f"{self.name}[{first}:{first + rows}]", first * self.row_bytes

        def read_into(offset: int, into: NDArray[np.uint8]) -> None:
            self.read_into(start + offset, into)

        cut = Cut(self, 1, first, rows)
        return Matrix(name, self.kind, rows, self.columns, rows * self.row_bytes, read_into, cut)

    def part_of_each(self, n: int, first: int, rows: int) -> Matrix:
        """Split the matrix into `n` equal parts, take `rows` rows of each part, and return them as one matrix.

        `first` is the first row to take from each part.
        """
        name = f"{self.name}[each {first}:{first + rows}]"
        whole, start, size = self.n_bytes // n, first * self.row_bytes, rows * self.row_bytes

        def read_into(offset: int, into: NDArray[np.uint8]) -> None:
            done = 0
            while done < into.size:
                part, within = divmod(offset + done, size)
                count = min(size - within, into.size - done)
                self.read_into(part * whole + start + within, into[done : done + count])
                done += count

        return Matrix(name, self.kind, n * rows, self.columns, n * size, read_into, Cut(self, n, first, rows))

    def gathered(self, name: str, rows: NDArray[np.intp]) -> Matrix:
        """Return the rows with these indices as a matrix. -1 stands for a row of zeros.

        name  tells this matrix from others of the same tensor
        """
        size = self.row_bytes

        def read_into(offset: int, into: NDArray[np.uint8]) -> None:
            first, end = offset // size, -(-(offset + into.size) // size)
            read = np.zeros((end - first, size), np.uint8)
            for to, row in enumerate(rows[first:end].tolist()):
                if row >= 0:
                    self.read_into(row * size, read[to])
            into[:] = read.reshape(-1)[offset - first * size :][: into.size]

        return Matrix(f"{self.name}[{name}]", self.kind, len(rows), self.columns, len(rows) * size, read_into)

    @property
    def tensor(self) -> str:
        """The name of the tensor in the file, of which this matrix may be a part."""
        return self.name if self.cut is None else self.cut.whole.tensor

    def same_part_of(self, other: Matrix) -> Matrix:
        """Return the rows of another matrix, which has as many rows as the tensor, that this matrix has of the tensor.

        For example, a LoRA adapter's matrix B has a row for each output of the tensor.
        """
        if self.cut is None:
            return other
        return self.cut.whole.same_part_of(other).part_of_each(self.cut.n, self.cut.first, self.cut.rows)

    def read(self) -> NDArray[np.uint8]:
        """Read the whole matrix as uint8[rows, row bytes]."""
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
        """The kernels' storage format for the matrix: a key of PACKED_TYPES or the name of a float type."""
        return packed_name(self.kind)
