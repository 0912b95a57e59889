"""Weight matrices: as the file has them, and packed for the kernels (pack.py describes the layout)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from llmrun.kernels import records
from llmrun.kernels.arena import address_of, allocate_huge, round_up
from llmrun.kernels.packed_types import (
    BLOCK_COLUMNS,
    GROUP_ROWS,
    PACKED_TYPES,
    SUPER_BLOCKS,
    WIDE,
    WIDENED_TYPES,
    packed_name,
)
from llmrun.kernels.store import KernelName

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2}

SUPPORTED = frozenset(PACKED_TYPES) - {WIDE} | WIDENED_TYPES | frozenset(_ELEMENT_BYTES)

# What a thread claims at once. Large enough that the claim (50 ns) is lost in it, small enough that the last one does
# not keep the others waiting.
CHUNK_BYTES = 24 << 10
_MOST_CHUNKS = 256

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


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where the planes of a group lie, in bytes from its start; the scales are first. See pack.py."""

    n_groups: int
    group_bytes: int
    mins: int = 0
    upper_scales: int = 0
    upper_mins: int = 0
    values: int = 0
    more_values: int = 0

    @classmethod
    def of(cls, matrix: Matrix) -> PackedLayout:
        n_groups = -(-matrix.rows // GROUP_ROWS)
        if not matrix.is_integer:
            columns = round_up(matrix.columns, 4)  # the float kernel takes four columns at once
            size = round_up(columns * GROUP_ROWS * _ELEMENT_BYTES[matrix.kind], records.CACHE_LINE)
            return cls(n_groups, size)
        packed = PACKED_TYPES[matrix.packed]
        blocks = matrix.columns // BLOCK_COLUMNS
        scales, upper = blocks * packed.scale_bytes, 2 * blocks // SUPER_BLOCKS if packed.two_levels else 0
        n_bytes = [scales, scales * packed.mins, upper, upper * packed.mins]  # of a row, in each plane
        n_bytes += [blocks * BLOCK_COLUMNS * bits // 8 for bits in packed.planes]
        starts = [0]
        for size in n_bytes:
            starts.append(starts[-1] + round_up(GROUP_ROWS * size, records.CACHE_LINE))
        return cls(n_groups, starts[-1], *starts[1 : len(n_bytes)])

    @property
    def planes(self) -> list[int]:
        """The words by which kernels know where the planes after the first are."""
        return [self.mins, self.upper_scales, self.upper_mins, self.values, self.more_values]

    @property
    def n_bytes(self) -> int:
        return self.n_groups * self.group_bytes

    @property
    def chunk_groups(self) -> int:
        by_size = -(-CHUNK_BYTES // self.group_bytes)
        return max(1, by_size, self.n_groups // _MOST_CHUNKS)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix in the kernels' layout; `data` uint8[groups, group bytes] lies in memory shared with others."""

    matrix: Matrix
    layout: PackedLayout
    data: NDArray[np.uint8]

    @property
    def address(self) -> int:
        return address_of(self.data)


def packing_kernel(kind: str) -> KernelName:
    if packed_name(kind) in PACKED_TYPES:
        return KernelName.of("pack", "pack_integers", weight=packed_name(kind))
    return KernelName.of("pack", "pack_floats", element_bytes=_ELEMENT_BYTES[kind])


def packed_bytes(matrices: Sequence[Matrix]) -> int:
    """What `reserve` takes."""
    return sum(round_up(PackedLayout.of(matrix).n_bytes, records.CACHE_LINE) for matrix in matrices)


def reserve(matrices: Sequence[Matrix]) -> dict[str, PackedMatrix]:
    """Zeroed memory for packed matrices, by name, in one allocation."""
    layouts = [PackedLayout.of(matrix) for matrix in matrices]
    sizes = [round_up(layout.n_bytes, records.CACHE_LINE) for layout in layouts]
    memory = allocate_huge(packed_bytes(matrices), "packed weights")
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return {
        matrix.name: PackedMatrix(
            matrix, layout, memory[start : start + layout.n_bytes].reshape(layout.n_groups, layout.group_bytes)
        )
        for matrix, layout, start in zip(matrices, layouts, starts, strict=True)
    }


def packing_kernels(matrices: Sequence[Matrix]) -> list[KernelName]:
    return [packing_kernel(matrix.kind) for matrix in matrices]
