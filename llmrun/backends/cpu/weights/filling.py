"""Reads and packs weights in background threads while the caller loads the rest of the model."""

from __future__ import annotations

import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from llmrun.backends.cpu.weights.packed import PackedMatrix, packing_kernel
from llmrun.backends.cpu.weights.widened import widened
from llmrun.base.compiled.store import Kernel, load_kernels
from llmrun.formats.layouts import records
from llmrun.formats.layouts.arena import address_of
from llmrun.formats.layouts.packed_types import WIDENED_TYPES
from llmrun.formats.quants.packed import GROUP_ROWS

# The number of bytes that a thread reads at a time. For SmolLM2's 98 MB and 2 threads, 128 KiB took 58 ms, 512 KiB
# 44 ms, 1 MiB 42 ms and 4 MiB 46 ms. Page faults of a memory-mapped file took 81 ms.
_STAGING_BYTES = 1 << 20

# The number of weights that a thread converts at a time for types that NumPy has to widen. The intermediate arrays
# should stay in the CPU cache. For IQ2_XXS and one thread, 32 Ki weights at a time ran at 271 million weights per
# second, 128 Ki at 329, 512 Ki at 333 and 2 Mi at 163.
_WIDENED_WEIGHTS = 256 << 10

# The interpreter's switch interval while weights are packed. Python's default of 5 ms is ten times as long as packing
# one part takes.
_SWITCH_SECONDS = 1e-4

Progress = Callable[[int, int], None]  # (matrices done, total matrices)


class Filling:
    """A running job that reads matrices and packs them into their reserved memory. `filling` creates it."""

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

    def finish(self, progress: Progress | None = None) -> None:
        """Wait until everything is packed. Raises any error from reading."""
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

    def stop(self) -> None:
        """Start no more parts. Parts that are already in progress are completed."""
        self._waiting.clear()

    def work(self) -> None:
        """Read and pack parts until none is left. Every thread runs this."""
        try:
            packer = _Packer(self._staging_bytes)
            while self._waiting:
                try:
                    part = self._waiting.popleft()
                except IndexError:  # another thread took the last part
                    return
                packer.pack(part)
                self._ended.put(part)
        except BaseException as error:  # noqa: BLE001  `finish` raises it in the caller's thread
            self.stop()
            self._ended.put(error)


@contextmanager
def filling(packed: Mapping[str, PackedMatrix], n_threads: int) -> Iterator[Filling]:
    """Read all matrices and pack them into their reserved memory, in threads that run during a `with` block:

        with filling(packed, n_threads) as weights:
            ...  # other work
            weights.finish()

    Each thread reads and packs one part of a matrix at a time, so no complete matrix is ever in memory twice. After an
    error or Ctrl-C in the block, parts already started are completed and no others are started. Raises the same errors
    as `load_kernels`.
    """
    weights = Filling(packed)
    with _switching_fast(), ThreadPoolExecutor(n_threads, thread_name_prefix="llmrun-packing") as pool:
        try:
            for _ in range(n_threads):
                pool.submit(weights.work)
            yield weights
        finally:
            weights.stop()


def fill(packed: Mapping[str, PackedMatrix], n_threads: int, progress: Progress | None = None) -> None:
    """Read and pack all matrices. Raises any error from reading."""
    with filling(packed, n_threads) as weights:
        weights.finish(progress)


def _part_groups(packed: PackedMatrix) -> int:
    matrix = packed.matrix
    rows = _WIDENED_WEIGHTS // matrix.columns if matrix.kind in WIDENED_TYPES else _STAGING_BYTES // matrix.row_bytes
    return max(1, rows // GROUP_ROWS)


@dataclass(frozen=True, slots=True)
class _MatrixPart:
    """A part of a matrix that a thread reads and packs in one go. `first` is the index of its first group."""

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
    """Shorten the interpreter's switch interval so that packing threads get the GIL back soon."""
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
