"""Measures this machine's memory bandwidth and int8 multiply-add rate. The kernels are in kernels/limits.py."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from llmrun.base.compiled.levels import host_target
from llmrun.base.compiled.store import Kernel, KernelName, load_kernels
from llmrun.formats.layouts import records
from llmrun.formats.layouts.arena import address_of, allocate, allocate_huge
from llmrun.formats.layouts.limits import MOST_SUMS, MultiplyWords, ReadWords, products_a_round

READ = KernelName.of("limits", "read")
MULTIPLY = KernelName.of("limits", "multiply")

_CHUNK_BYTES = 1 << 18
# The access patterns that are measured: (streams, prefetch distance). Which one is fastest depends on the processor.
# The table shows GB/s on an AMD Zen 3 (medians of 30 alternating rounds with one thread, and of 20 with two):
#
#   streams          1      2      4      8     4, and 4 KB ahead
#   one thread    18.3   21.7   22.9   21.0     18.1
#   two threads   25.5   27.3   28.3   25.1     23.3
_WAYS = ((1, 0), (2, 0), (4, 0), (8, 0), (1, 8 << 10), (4, 4 << 10))
_ROUNDS = 60_000_000  # about 0.1 s, long enough that a thread that starts late changes the result by only a few percent


class MachineLimits:
    """A benchmark of this machine's limits with `n_threads` threads.

    It allocates `memory_bytes` of memory to read from, which should be larger than any CPU cache.
    """

    def __init__(self, n_threads: int, memory_bytes: int = 1 << 30) -> None:
        kernels = load_kernels([READ, MULTIPLY])
        self._read, self._multiply = kernels[READ], kernels[MULTIPLY]
        self._n_threads = n_threads
        self._n_chunks = -(-memory_bytes // _CHUNK_BYTES)
        # Weights use huge pages too. We measured 39.1 GB/s for reading from huge pages, and 37.6 GB/s from small pages
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
