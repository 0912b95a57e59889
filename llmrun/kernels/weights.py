"""Weight matrices: as the file has them, and packed for the kernels (pack.py describes the layout)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmrun.kernels import records
from llmrun.kernels.arena import address_of, allocate, round_up
from llmrun.kernels.store import Kernel, KernelName, load_kernels

if TYPE_CHECKING:
    from numpy.typing import NDArray

GROUP_ROWS = 16
BLOCK_COLUMNS = 32

_SCALE_PLANES = {"q4_0": 1, "q4_1": 2, "q8_0": 1}
_INTEGER_BYTES = {"q4_0": 256, "q4_1": 256, "q8_0": 512}  # of a block of 16 rows x 32 columns
_ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2}

SUPPORTED = frozenset(_SCALE_PLANES) | frozenset(_ELEMENT_BYTES)

# What a thread claims at once. Large enough that the claim (50 ns) is lost in it, small enough that the last one does
# not keep the others waiting.
_CHUNK_BYTES = 24 << 10
_MOST_CHUNKS = 256


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix in the file. `data` uint8[rows * row bytes], a view of the mapping."""

    name: str
    kind: str  # "q4_1": the weight type's name in lower case
    rows: int  # outputs
    columns: int  # inputs
    data: NDArray[np.uint8]

    @property
    def row_bytes(self) -> int:
        return self.data.size // self.rows

    @property
    def is_integer(self) -> bool:
        return self.kind in _SCALE_PLANES


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where the planes of a group lie, in bytes from its start."""

    n_groups: int
    group_bytes: int
    mins: int
    integers: int

    @classmethod
    def of(cls, matrix: Matrix) -> PackedLayout:
        n_groups = -(-matrix.rows // GROUP_ROWS)
        if not matrix.is_integer:
            columns = round_up(matrix.columns, 4)  # the float kernel takes four columns at once
            size = round_up(columns * GROUP_ROWS * _ELEMENT_BYTES[matrix.kind], records.CACHE_LINE)
            return cls(n_groups, size, 0, 0)
        blocks = matrix.columns // BLOCK_COLUMNS
        plane = round_up(blocks * GROUP_ROWS * 2, records.CACHE_LINE)
        integers = plane * _SCALE_PLANES[matrix.kind]
        return cls(n_groups, integers + blocks * _INTEGER_BYTES[matrix.kind], plane, integers)

    @property
    def n_bytes(self) -> int:
        return self.n_groups * self.group_bytes

    @property
    def chunk_groups(self) -> int:
        by_size = -(-_CHUNK_BYTES // self.group_bytes)
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


def _packing_kernel(kind: str) -> KernelName:
    if kind in _SCALE_PLANES:
        return KernelName.of("pack", "pack_integers", weight=kind)
    return KernelName.of("pack", "pack_floats", element_bytes=_ELEMENT_BYTES[kind])


def reserve(matrices: Sequence[Matrix]) -> dict[str, PackedMatrix]:
    """Zeroed memory for packed matrices, by name, in one allocation."""
    layouts = [PackedLayout.of(matrix) for matrix in matrices]
    sizes = [round_up(layout.n_bytes, records.CACHE_LINE) for layout in layouts]
    memory = allocate(sum(sizes), "packed weights")
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return {
        matrix.name: PackedMatrix(
            matrix, layout, memory[start : start + layout.n_bytes].reshape(layout.n_groups, layout.group_bytes)
        )
        for matrix, layout, start in zip(matrices, layouts, starts, strict=True)
    }


def packing_kernels(matrices: Sequence[Matrix]) -> list[KernelName]:
    return [_packing_kernel(matrix.kind) for matrix in matrices]


def fill(
    packed: Mapping[str, PackedMatrix], n_threads: int, progress: Callable[[int, int], None] | None = None
) -> None:
    """Pack every matrix into its reserved memory, in parallel. `progress` gets matrices done and matrices in all."""
    kernels = load_kernels(packing_kernels([entry.matrix for entry in packed.values()]))
    with ThreadPoolExecutor(n_threads) as pool:
        for done, entry in enumerate(packed.values(), 1):
            _fill_one(entry, kernels[_packing_kernel(entry.matrix.kind)], pool, n_threads)
            if progress is not None:
                progress(done, len(packed))


def _fill_one(packed: PackedMatrix, kernel: Kernel, pool: ThreadPoolExecutor, n_threads: int) -> None:
    matrix, layout = packed.matrix, packed.layout
    claims = np.zeros(1, np.int64)
    op = np.zeros(records.OP_WORDS, np.int64)
    op[records.OP_CLAIM // records.WORD] = address_of(claims)
    words = [
        address_of(matrix.data),
        packed.address,
        matrix.rows,
        matrix.columns,
        matrix.row_bytes,
        layout.group_bytes,
        layout.mins,
        layout.integers,
    ]
    first = records.OP_ARGS // records.WORD
    op[first : first + len(words)] = words
    for future in [pool.submit(kernel.run, address_of(op), 0, thread, n_threads) for thread in range(n_threads)]:
        future.result()
