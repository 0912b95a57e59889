"""Weight matrices packed for the kernels (kernels/packing/pack.py describes the layout)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmrun.compiled.store import KernelName
from llmrun.layouts import records
from llmrun.layouts.arena import address_of, allocate_huge, round_up
from llmrun.layouts.packed_types import FLOAT_BYTES, PACKED_TYPES, packed_name
from llmrun.layouts.tile_shapes import MOST_GROUPS
from llmrun.plan.matrix import Matrix
from llmrun.quants.packed import BLOCK_COLUMNS, GROUP_ROWS, SUPER_BLOCKS

if TYPE_CHECKING:
    from numpy.typing import NDArray


# The sizes of the chunks of weights that a thread claims. Chunks of at least the smallest size make the 50 ns that a
# claim takes negligible. Larger chunks are read faster, because hardware prefetchers need long streams (STREAMS in
# kernels/linear/parts.py has the details). With two threads and four streams, we measured 24.3 GB/s with chunks of
# 36 KB, 26.7 with 72 KB, 26.0 with 144 KB and 22.3 with 288 KB (Q4_0, AMD Zen 3).
CHUNK_BYTES = 24 << 10
_LARGE_CHUNK_BYTES = 80 << 10
_CHUNKS_PER_THREAD = 16  # at least this many large chunks per thread, so that threads do not wait long for the last one
_MOST_CHUNKS = 256


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """The byte offsets of the planes within a group. The scales are at offset 0. See pack.py."""

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
            columns = round_up(matrix.columns, 4)  # the float kernel processes four columns at a time
            size = round_up(columns * GROUP_ROWS * FLOAT_BYTES[matrix.kind], records.CACHE_LINE)
            return cls(n_groups, size)
        packed = PACKED_TYPES[matrix.packed]
        blocks = matrix.columns // BLOCK_COLUMNS
        scales, upper = blocks * packed.scale_bytes, 2 * blocks // SUPER_BLOCKS if packed.two_levels else 0
        n_bytes = [scales, scales * packed.mins, upper, upper * packed.mins]  # bytes per row in each plane
        n_bytes += [blocks * BLOCK_COLUMNS * bits // 8 for bits in packed.planes]
        starts = [0]
        for size in n_bytes:
            starts.append(starts[-1] + round_up(GROUP_ROWS * size, records.CACHE_LINE))
        return cls(n_groups, starts[-1], *starts[1 : len(n_bytes)])

    @property
    def planes(self) -> list[int]:
        """The offsets of all planes after the first, in the order in which kernels receive them."""
        return [self.mins, self.upper_scales, self.upper_mins, self.values, self.more_values]

    @property
    def n_bytes(self) -> int:
        return self.n_groups * self.group_bytes

    def chunk_groups(self, n_threads: int) -> int:
        """Return how many groups a thread claims at a time."""
        smallest = -(-CHUNK_BYTES // self.group_bytes)
        large = min(_LARGE_CHUNK_BYTES // self.group_bytes, self.n_groups // (_CHUNKS_PER_THREAD * n_threads))
        return max(1, smallest, large, self.n_groups // _MOST_CHUNKS)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix in the kernels' layout.

    `data`, uint8[groups, group bytes], is a view of memory that all matrices share.
    """

    matrix: Matrix
    layout: PackedLayout
    data: NDArray[np.uint8]

    @property
    def address(self) -> int:
        return address_of(self.data)


def panel_bytes(matrix: Matrix) -> int:
    """Return the total size in bytes of the panels that one thread uses at the same time."""
    return MOST_GROUPS * matrix.columns // BLOCK_COLUMNS * PACKED_TYPES[matrix.packed].panel_block_bytes


def packing_kernel(kind: str) -> KernelName:
    if packed_name(kind) in PACKED_TYPES:
        return KernelName.of("packing.pack", "pack_integers", weight=packed_name(kind))
    return KernelName.of("packing.pack", "pack_floats", element_bytes=FLOAT_BYTES[kind])


def packed_bytes(matrices: Sequence[Matrix]) -> int:
    """Return the number of bytes that `reserve` allocates."""
    return sum(round_up(PackedLayout.of(matrix).n_bytes, records.CACHE_LINE) for matrix in matrices)


def reserve(matrices: Sequence[Matrix]) -> dict[str, PackedMatrix]:
    """Allocate one block of zeroed memory for all packed matrices, and return the matrices by name."""
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
