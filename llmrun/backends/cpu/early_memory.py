"""Takes memory for the weights from the system in a thread, while the main thread still imports the engine.

Until the weights are packed, only one core is busy. A page that the system has supplied before then does not delay the
packing. In addition, virtual machines may return free memory to their host within seconds, and each huge page that the
host has to find again takes 5 to 7 ms instead of 0.2 ms. The earlier a start takes the memory that the previous process
has freed, the less of it is lost. On such a machine with two cores, a 1.1 GB model in a loop of `generate -n 1` had its
first token after 1.25 s instead of 1.57 s, with 0.62 s instead of 1.13 s of system time (medians of 11 rounds with a
prototype). A thread that started only in `reserve`, while kernels are loaded, gained nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from typing import TYPE_CHECKING, Final

import numpy as np

from llmrun.base.machine.memory import address_space_limit, free_memory
from llmrun.formats.layouts.linear import WIDENED_TYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from llmrun.formats.gguf.tensors import TensorInfo

_HUGE_PAGE: Final = 2 << 20
_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE, which changes no bytes; Linux 5.14
_LEAST: Final = 256 << 20  # smaller models gain less than 10 ms
_ROOM: Final = 1.25  # packed weights take at most this multiple of their size in the file
_CERTAIN: Final = 0.95  # the share of the weights that surely needs memory; a few tensors are never packed
_FREE: Final = 2  # the free memory in multiples of the weights, so that models that barely fit are refused as usual


class EarlyMemory:
    """A region of memory. Until `stop`, a thread takes the region's first pages from the system."""

    def __init__(self, n_bytes: int) -> None:
        """Start to take the memory for about `n_bytes` of weights. Raises OSError if there is no address space."""
        self._region = _mapped(int(n_bytes * _ROOM))
        self._stopped = threading.Event()
        self._wanted = int(n_bytes * _CERTAIN)
        self.touched = 0
        self._thread = threading.Thread(target=self._touch, name="llmrun-memory")
        self._thread.start()

    def stop(self) -> int:
        """Stop taking memory, and return the number of bytes taken. Idempotent."""
        self._stopped.set()
        self._thread.join()
        return self.touched

    def array(self, n_bytes: int) -> NDArray[np.uint8] | None:
        """Return the region as zeroed uint8[n_bytes], or None if the region is too small. Call `stop` first."""
        if sys.platform != "linux" or n_bytes > len(self._region):
            return None
        rest = -(-n_bytes // _HUGE_PAGE) * _HUGE_PAGE
        if rest < self.touched:
            self._region.madvise(mmap.MADV_DONTNEED, rest)
        return np.frombuffer(self._region, np.uint8)[:n_bytes]

    def _touch(self) -> None:
        # mmap.madvise would hold the GIL. One call per page keeps the lock on this process's memory map short.
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        address = np.frombuffer(self._region, np.uint8).ctypes.data
        while self.touched < self._wanted and not self._stopped.is_set():
            if advise(address + self.touched, _HUGE_PAGE, _POPULATE_WRITE):  # an older kernel, or not enough memory
                return
            self.touched += _HUGE_PAGE


def _mapped(n_bytes: int) -> mmap.mmap:
    if sys.platform != "linux":
        raise OSError("only Linux supplies huge pages on request")
    region = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_HUGEPAGE)
    return region


def early_memory(tensors: Mapping[str, TensorInfo], reserved: int = 0) -> EarlyMemory | None:
    """Start to take memory for a model's weights, or return None where that gains nothing or could do harm.

    reserved  bytes of free memory that are promised to others
    """
    if sys.platform != "linux":
        return None
    weights = [tensor for tensor in tensors.values() if len(tensor.shape) > 1]
    size = sum(tensor.nbytes for tensor in weights)
    if size < _LEAST or any(tensor.type.name.lower() in WIDENED_TYPES for tensor in weights):
        return None
    free = free_memory(reserved=reserved)
    if free is None or free < _FREE * size or address_space_limit() is not None:
        return None
    try:
        return EarlyMemory(size)
    except OSError:  # a kernel without huge pages, or a system that does not overcommit memory
        return None
