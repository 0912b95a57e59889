"""Data types for the measured speeds of ops, the files that store these speeds, and benchmarks of the machine's limits.

The cache folder contains one file for each number of threads. A file is used if it is well formed, less than a month
old, and was written for the same processor, instruction-set level, number of threads and llmrun version. The subject
TAKEN records when each figure was measured, and what disturbed the measurement, if anything.

machine.py measures the speeds of ops. The kernels for the limits, memory bandwidth and the rate of int8 multiply-adds,
are in kernels/limits.py.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from msgspec import Struct

from llmrun.base import folders
from llmrun.base.compiled.host import host_target, load_kernels, machine_key
from llmrun.base.compiled.kernel import Kernel, KernelName
from llmrun.base.folders import is_recent
from llmrun.formats.layouts import records
from llmrun.formats.layouts.arena import address_of, allocate, allocate_huge
from llmrun.formats.layouts.records import MOST_SUMS, MultiplyWords, ReadWords, products_a_round

if TYPE_CHECKING:
    from llmrun.model.plan.shapes import AttentionShape

WIDTHS = (512, 2048, 8192)


class LinearSpeed(Struct, frozen=True):
    """The speed of matrix products with one weight type.

    read      bytes of weights read per second with a single row
    op        fixed cost of an op in seconds, including its barrier
    multiply  multiply-adds per second with many rows, for each number of columns in WIDTHS
    """

    read: float
    op: float
    multiply: tuple[float, ...]

    def products(self, columns: int) -> float:
        """Return the multiply-adds per second for rows with this many columns."""
        return between(columns, self.multiply)


class RowSpeed(Struct, frozen=True):
    """The speed of a row-wise op for each row width in WIDTHS.

    one   seconds for a single row
    many  seconds per row in a step with many rows
    """

    one: tuple[float, ...]
    many: tuple[float, ...]

    def seconds(self, rows: int, width: int) -> float:
        return between(width, self.one) if rows == 1 else rows * between(width, self.many)

    def shared_seconds(self, rows: int, width: int) -> float:
        """Return the time in seconds for rows that are wide enough to be split between threads.

        A single row that is split takes as long per feature as a row of a step with many rows.
        """
        return rows * width * self.many[-1] / WIDTHS[-1]


class AttentionSpeed(Struct, frozen=True):
    """The speed of attention for one attention shape and one KV cache type.

    op          seconds for one row with an empty context
    read        bytes of keys and values per second, for one row
    multiply    multiply-adds per second, for many rows
    rope_one    seconds to rotate and store a single row, per feature of queries, keys and values
    rope_many   seconds to rotate and store a row in a step with many rows, per feature
    step        seconds per step spent outside the ops, on waking the threads and waiting for them
    """

    op: float
    read: float
    multiply: float
    rope_one: float
    rope_many: float
    step: float


def between(width: int, values: Sequence[float]) -> float:
    """Interpolate values measured at WIDTHS, linearly in the logarithm of the width and clamped at both ends."""
    return float(np.interp(log2(width), [log2(one) for one in WIDTHS], values))


class SpeedTable(Protocol):
    """The measured speeds for one machine and number of threads."""

    def linear(self, packed: str) -> LinearSpeed:
        """Return the speed of matrix products with weights in the given packed form (Matrix.packed)."""

    def rows(self, name: str) -> RowSpeed:
        """Return the speed of "rmsnorm", "swiglu" or "quantize"."""

    def attention(self, shape: AttentionShape, kv_type: str) -> AttentionSpeed:
        """Return the speed of one layer of this shape."""

    def read_bandwidth(self) -> float:
        """Return the memory bandwidth of all threads together, in bytes per second."""


_MOST_FILE_BYTES = 1 << 20

Known = dict[str, dict[str, Any]]  # the measured figures of each subject, such as "linear q8_0"
# The subject that maps each measured subject to {"at": seconds since 1970, "disturbed": what disturbed it, or ""}.
TAKEN = "taken"


def kept_speeds(n_threads: int) -> Known:
    """Return the stored speeds that are not too old, or {} if there are no usable speeds."""
    path = _path(n_threads)
    try:
        if path.stat().st_size > _MOST_FILE_BYTES:
            return {}
        body = json.loads(path.read_text(encoding="utf-8"))
        if body["machine"] != machine_key(n_threads) or not is_recent(body["measured"]):
            return {}
        known = {name: dict(values) for name, values in body["speeds"].items()}
        taken = known.get(TAKEN, {})
        return {name: values for name, values in known.items() if name not in taken or is_recent(taken[name]["at"])}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}  # the file is missing or damaged, so the speeds are measured again


def keep_speeds(n_threads: int, known: Known) -> None:
    """Store speeds for later processes, which measure the speeds again if storing fails."""
    body = {"measured": time.time(), "machine": machine_key(n_threads), "speeds": known}
    with contextlib.suppress(OSError):
        folders.write_whole(_path(n_threads), json.dumps(body).encode())


def _path(n_threads: int) -> Path:
    return folders.cache_folder("speeds") / f"{n_threads}.json"


READ = KernelName.of("limits", "read")
MULTIPLY = KernelName.of("limits", "multiply")

_CHUNK_BYTES = 1 << 18
# The access patterns that are measured: (streams, prefetch distance). The fastest pattern depends on the processor. The
# table shows GB/s on an AMD Zen 3 (medians of 30 alternating rounds with one thread, and of 20 with two):
#
#   streams          1      2      4      8     4, and 4 KB ahead
#   one thread    18.3   21.7   22.9   21.0     18.1
#   two threads   25.5   27.3   28.3   25.1     23.3
_WAYS = ((1, 0), (2, 0), (4, 0), (8, 0), (1, 8 << 10), (4, 4 << 10))
_ROUNDS = 60_000_000  # about 0.1 s, long enough that a thread that starts late changes the result by only a few percent


class MachineLimits:
    """A benchmark of this machine's limits with `n_threads` threads.

    The benchmark reads from `memory_bytes` of memory, which should be more than any CPU cache holds.
    """

    def __init__(self, n_threads: int, memory_bytes: int = 1 << 30) -> None:
        kernels = load_kernels([READ, MULTIPLY])
        self._read, self._multiply = kernels[READ], kernels[MULTIPLY]
        self._n_threads = n_threads
        self._n_chunks = -(-memory_bytes // _CHUNK_BYTES)
        # Weights also use huge pages. We measured 39.1 GB/s for reading from huge pages, and 37.6 GB/s from small pages
        # (medians of 15 alternating runs).
        self._memory = allocate_huge(self._n_chunks * _CHUNK_BYTES, "memory to measure its speed")
        self._memory[:] = 1  # untouched pages would all map to the same zero page
        self._vectors = allocate(records.CACHE_LINE * MOST_SUMS, "vectors to multiply")
        self._vectors[:] = 3
        self._results = allocate(records.CACHE_LINE * MOST_SUMS * n_threads, "results of measurements")

    def read_bandwidth(self) -> float:
        """Return the memory bandwidth of all threads together, in bytes per second, with the fastest access pattern."""
        return len(self._memory) / min(self._read_seconds(*way) for way in _WAYS)

    def _read_seconds(self, streams: int, ahead: int) -> float:
        words = ReadWords(
            address_of(self._memory), self._n_chunks, _CHUNK_BYTES, address_of(self._results), streams, ahead
        )
        return self._seconds(self._read, words)

    def multiply_rate(self) -> float:
        """Return how many int8 multiply-adds all threads together compute per second."""
        words = MultiplyWords(_ROUNDS, address_of(self._vectors), results=address_of(self._results))
        seconds = self._seconds(self._multiply, words)
        return _ROUNDS * products_a_round(host_target().level.name) * self._n_threads / seconds

    def _seconds(self, kernel: Kernel, words: Sequence[int]) -> float:
        claims = np.zeros(1, np.int64)
        op = np.zeros(records.OP_WORDS, np.int64)
        op[records.OP_CLAIM // records.WORD] = address_of(claims)
        first = records.OP_ARGS // records.WORD
        op[first : first + len(words)] = words
        with ThreadPoolExecutor(self._n_threads) as pool:
            started = time.perf_counter()
            list(
                pool.map(lambda thread: kernel.run(address_of(op), 0, thread, self._n_threads), range(self._n_threads))
            )
            return time.perf_counter() - started
