"""Weight matrices packed for the kernels (quants/packed.py describes the layout)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmrun.base.compiled.store import KernelName
from llmrun.formats.layouts import records
from llmrun.formats.layouts.arena import address_of, allocate_huge, round_up
from llmrun.formats.layouts.packed_types import FLOAT_BYTES, PACKED_TYPES, packed_name
from llmrun.formats.layouts.tile_shapes import MOST_GROUPS
from llmrun.formats.quants.packed import BLOCK_COLUMNS, GROUP_ROWS
from llmrun.model.plan.matrix import Matrix

if TYPE_CHECKING:
    from numpy.typing import NDArray


# The sizes of the chunks of weights that a thread claims. Chunks of at least the smallest size make the 50 ns that a
# claim takes negligible. Larger chunks are read faster, because hardware prefetchers need long streams (_STREAMS in
# kernels/linear/parts.py has the details). But the chunk that is multiplied and the next one, which is prefetched at
# the same time, share the core's L2 cache with activations. The table shows how fast Q4_0 is read in four streams, in
# GB/s, on an AMD Zen 3 with 512 KB of L2 cache per core. It comes from one run, while other runs gave up to 21 GB/s for
# two threads:
#
#   chunk, KB       18    36    72   144   288
#   one thread     9.5  11.5  12.6  11.1  11.3
#   two threads   13.8  17.4  18.7  17.0  15.8
#
# On a Zen 4 without software prefetching, chunks of 320 KB were 3 to 5 % faster than chunks of 80 KB. Chunks are laid
# out before the way of prefetching is chosen, so there is one size for all.
_CHUNK_BYTES = 24 << 10
_LARGE_CHUNK_BYTES = 80 << 10
_CHUNKS_PER_THREAD = 16  # at least this many large chunks per thread, so that threads do not wait long for the last one


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """The number and the size of a matrix's groups of 16 rows."""

    n_groups: int
    group_bytes: int

    @classmethod
    def of(cls, matrix: Matrix) -> PackedLayout:
        n_groups = -(-matrix.rows // GROUP_ROWS)
        if not matrix.is_integer:
            columns = round_up(matrix.columns, 4)  # the float kernel processes four columns at a time
            size = round_up(columns * GROUP_ROWS * FLOAT_BYTES[matrix.kind], records.CACHE_LINE)
            return cls(n_groups, size)
        return cls(n_groups, PACKED_TYPES[matrix.packed].group_bytes(matrix.columns))

    @property
    def n_bytes(self) -> int:
        return self.n_groups * self.group_bytes

    def chunk_groups(self, n_threads: int, n_groups: int = 0) -> int:
        """Return how many groups a thread claims at a time in a step that reads `n_groups` groups (default: all)."""
        smallest = -(-_CHUNK_BYTES // self.group_bytes)
        enough = (n_groups or self.n_groups) // (_CHUNKS_PER_THREAD * n_threads)
        return max(1, smallest, min(_LARGE_CHUNK_BYTES // self.group_bytes, enough))


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
