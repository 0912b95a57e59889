"""Packs weight matrices for the kernels, in background threads while the caller loads the rest of the model.

quants/weight_type.py describes the layout. Weight types without a packed form (layouts/linear.py) are first converted
with NumPy to one format with a byte per weight.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from llmrun.base.compiled.host import load_kernels
from llmrun.base.compiled.kernel import Kernel, KernelName
from llmrun.base.machine.own_process import ThreadCosts, thread_costs
from llmrun.formats.layouts import records
from llmrun.formats.layouts.arena import address_of, allocate_huge, round_up
from llmrun.formats.layouts.linear import FLOAT_BYTES, MOST_GROUPS, PACKED_TYPES, WIDE_BYTES, WIDENED_TYPES, packed_name
from llmrun.formats.quants.weight_type import BLOCK_COLUMNS, GROUP_ROWS
from llmrun.model.plan.matrix import Matrix

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.cpu.early_memory import EarlyMemory

# The sizes of the chunks of weights that a thread claims. With chunks of at least the smallest size, the 50 ns of a
# claim are negligible. Larger chunks are read faster, because hardware prefetchers need long streams (see _STREAMS in
# kernels/linear/parts.py). However, the chunk that is multiplied and the next chunk, which is prefetched at the same
# time, share the core's L2 cache with activations. The table shows how fast Q4_0 is read in four streams, in GB/s, on
# an AMD Zen 3 with 512 KB of L2 cache per core. The figures come from one run, but other runs reached up to 21 GB/s
# with two threads:
#
#   chunk, KB       18    36    72   144   288
#   one thread     9.5  11.5  12.6  11.1  11.3
#   two threads   13.8  17.4  18.7  17.0  15.8
#
# On a Zen 4 without software prefetching, chunks of 320 KB were 3 to 5 % faster than chunks of 80 KB. Chunks are laid
# out before the prefetching method is chosen, so all methods use the same size.
_CHUNK_BYTES = 24 << 10
_LARGE_CHUNK_BYTES = 80 << 10
_CHUNKS_PER_THREAD = 16  # the minimum number of large chunks per thread, which shortens the wait for the last chunk


class PackedLayout(Struct, frozen=True):
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


class PackedMatrix(Struct, frozen=True):
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


def product_kernel(matrix: Matrix, folder: str, function: str) -> KernelName:
    """Return the kernel in `kernels/<folder>` that multiplies inputs, as integers or floats, by the packed matrix."""
    return KernelName.of(f"{folder}.{'int8' if matrix.is_integer else 'floats'}", function, weight=matrix.packed)


def packed_bytes(matrices: Sequence[Matrix]) -> int:
    """Return the number of bytes that `reserve` allocates."""
    return sum(round_up(PackedLayout.of(matrix).n_bytes, records.CACHE_LINE) for matrix in matrices)


def reserve(matrices: Sequence[Matrix], early: EarlyMemory | None = None) -> dict[str, PackedMatrix]:
    """Allocate one block of zeroed memory for all packed matrices, and return the matrices by name.

    If the memory that was taken early is large enough, it is used.
    """
    layouts = [PackedLayout.of(matrix) for matrix in matrices]
    sizes = [round_up(layout.n_bytes, records.CACHE_LINE) for layout in layouts]
    memory = None if early is None else early.array(packed_bytes(matrices))
    if memory is None:
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


def widened(kind: str, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Convert uint8[rows, row bytes in the file] to uint8[rows, 40 * columns / 32].

    Each block of the result contains two scales and 32 integers. A weight is exactly its integer times its scale.
    """
    from llmrun.formats.quants.registry import BY_NAME

    unpack = BY_NAME[kind.upper()].unpack
    assert unpack is not None
    weights = unpack(raw)
    rows, columns = weights.values.shape
    scales, numbers = weights.super_scales, weights.sub_scales
    if numbers is not None:
        scales = np.repeat(scales, numbers.shape[1] // scales.shape[1], axis=1) * numbers.astype(np.float32)
    scales = np.repeat(scales, columns // 16 // scales.shape[1], axis=1).astype(np.float32)
    blocks = np.empty((rows, columns // 32, WIDE_BYTES), np.uint8)
    blocks[..., :8] = scales.reshape(rows, -1, 2).view(np.uint8)
    blocks[..., 8:] = weights.values.reshape(rows, -1, 32).view(np.uint8)
    return blocks.reshape(rows, -1)


# The number of bytes that a thread reads at a time. For SmolLM2's 98 MB and 2 threads, 128 KiB took 58 ms, 512 KiB
# 44 ms, 1 MiB 42 ms and 4 MiB 46 ms. Page faults of a memory-mapped file took 81 ms.
_STAGING_BYTES = 1 << 20

# The number of weights that a thread converts at a time for types that NumPy has to widen. The intermediate arrays
# should stay in the CPU cache. For IQ2_XXS and one thread, 32 Ki weights at a time ran at 271 million weights per
# second, 128 Ki at 329, 512 Ki at 333 and 2 Mi at 163.
_WIDENED_WEIGHTS = 256 << 10

# The interpreter's switch interval while weights are packed. Python's default of 5 ms is ten times the time to pack one
# part.
_SWITCH_SECONDS = 1e-4

Progress = Callable[[int, int], None]  # (matrices done, total matrices)


class Filling:
    """A running job, created by `filling`, that reads matrices and packs them into their reserved memory.

    `seconds` is the time from the start until `finish` has returned.
    """

    def __init__(self, packed: Mapping[str, PackedMatrix]) -> None:
        kernels = load_kernels([packing_kernel(entry.matrix.kind) for entry in packed.values()])
        parts = [
            _MatrixPart(entry, kernels[packing_kernel(entry.matrix.kind)], first)
            for entry in packed.values()
            for first in range(0, entry.layout.n_groups, _part_groups(entry))
        ]
        self._parts_of = Counter(part.packed.matrix.name for part in parts)
        self._staging_bytes = max((part.rows * part.packed.matrix.row_bytes for part in parts), default=0)
        self._waiting = deque(parts)
        self._ended: SimpleQueue[_MatrixPart | BaseException] = SimpleQueue()
        self._costs: list[ThreadCosts] = []
        self._began, self.seconds = time.perf_counter(), 0.0

    def finish(self, progress: Progress | None = None) -> None:
        """Wait until all matrices are packed. Raises any error from reading."""
        done, left = 0, self._parts_of.copy()
        while done < len(self._parts_of):
            part = self._ended.get()
            if isinstance(part, BaseException):
                raise part
            name = part.packed.matrix.name
            left[name] -= 1
            if not left[name]:
                done += 1
                if progress is not None:
                    progress(done, len(self._parts_of))
        self.seconds = time.perf_counter() - self._began

    def costs(self) -> ThreadCosts | None:
        """Return the costs of all threads, which have ended after the `with` block of `filling`. None if unknown."""
        if not self._costs:
            return None
        return ThreadCosts(sum(each.page_faults for each in self._costs), sum(each.system_s for each in self._costs))

    def stop(self) -> None:
        """Stop starting new parts. Parts that are already in progress are completed."""
        self._waiting.clear()

    def work(self) -> None:
        """Read and pack parts until none is left. Every thread runs this method."""
        try:
            packer = _Packer(self._staging_bytes)
            while self._waiting:
                try:
                    part = self._waiting.popleft()
                except IndexError:  # another thread has taken the last part
                    return
                packer.pack(part)
                self._ended.put(part)
        except BaseException as error:  # noqa: BLE001  `finish` raises the error in the caller's thread
            self.stop()
            self._ended.put(error)
        finally:
            if (costs := thread_costs()) is not None:  # the thread does nothing else
                self._costs.append(costs)


@contextmanager
def filling(packed: Mapping[str, PackedMatrix], n_threads: int) -> Iterator[Filling]:
    """Read all matrices and pack them into their reserved memory, in threads that run during a `with` block:

        with filling(packed, n_threads) as weights:
            ...  # other work
            weights.finish()

    Each thread reads and packs one part of a matrix at a time, so no complete matrix is ever in memory twice. After an
    error or Ctrl-C in the block, parts already started are completed, but no new parts are started. Raises the same
    errors as `load_kernels`.
    """
    weights = Filling(packed)
    with _switching_fast(), ThreadPoolExecutor(n_threads, thread_name_prefix="llmrun-packing") as pool:
        try:
            for _ in range(n_threads):
                pool.submit(weights.work)
            yield weights
        finally:
            weights.stop()


def _part_groups(packed: PackedMatrix) -> int:
    matrix = packed.matrix
    rows = _WIDENED_WEIGHTS // matrix.columns if matrix.kind in WIDENED_TYPES else _STAGING_BYTES // matrix.row_bytes
    return max(1, rows // GROUP_ROWS)


class _MatrixPart(Struct, frozen=True):
    """A part of a matrix that a thread reads and packs as a unit. `first` is the index of the part's first group."""

    packed: PackedMatrix
    kernel: Kernel
    first: int

    @property
    def rows(self) -> int:
        return min(self.packed.matrix.rows - self.first * GROUP_ROWS, _part_groups(self.packed) * GROUP_ROWS)


class _Packer:
    """The staging memory and the op record that one thread uses for packing."""

    def __init__(self, staging_bytes: int) -> None:
        self._staging = np.empty(staging_bytes, np.uint8)
        self._claims = np.zeros(1, np.int64)
        self._op = np.zeros(records.OP_WORDS, np.int64)
        self._op[records.OP_CLAIM // records.WORD] = address_of(self._claims)

    def pack(self, part: _MatrixPart) -> None:
        matrix, layout, rows = part.packed.matrix, part.packed.layout, part.rows
        source = self._staging[: rows * matrix.row_bytes]
        matrix.read_into(part.first * GROUP_ROWS * matrix.row_bytes, source)
        row_bytes = matrix.row_bytes
        if matrix.kind in WIDENED_TYPES:
            source = widened(matrix.kind, source.reshape(rows, -1))
            row_bytes = source.shape[1]
        words = [
            address_of(source),
            part.packed.address + part.first * layout.group_bytes,
            rows,
            matrix.columns,
            row_bytes,
            layout.group_bytes,
        ]
        first_word = records.OP_ARGS // records.WORD
        self._op[first_word : first_word + len(words)] = words
        self._claims[0] = 0
        part.kernel.run(address_of(self._op), 0, 0, 1)


_lock = threading.Lock()
_users = 0
_usual_interval = 0.0


@contextmanager
def _switching_fast() -> Iterator[None]:
    """Shorten the interpreter's switch interval so that packing threads reacquire the GIL quickly."""
    global _users, _usual_interval
    with _lock:
        if not _users:
            _usual_interval = sys.getswitchinterval()
            sys.setswitchinterval(_SWITCH_SECONDS)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                sys.setswitchinterval(_usual_interval)
