"""Memory for weights, the KV cache and activations: anonymous, aligned to pages, zero until touched."""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING

import numpy as np

from llmrun.amounts import format_mebibytes
from llmrun.errors import DoesNotFit

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HUGE_PAGE = 2 << 20

# Private: Python's default is shared memory, which Linux gives no huge pages unless an administrator asks for them.
# 1.24B Q4_0, 763 MB, 2 threads, one run each: packed in 181 ms instead of 327, freed in 3 instead of 138. Decoding, 15
# rounds: 48.9 tok/s (37 to 63) instead of 46.5 (38 to 59).
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def allocate(n_bytes: int, what: str) -> NDArray[np.uint8]:
    """uint8[n_bytes] of zeros, page aligned: for memory of which a part may never be used, such as a KV cache.

    `what` names the memory in the DoesNotFit that is raised when there is none.
    """
    return np.frombuffer(_mapped(n_bytes, what), np.uint8)[:n_bytes]


def allocate_huge(n_bytes: int, what: str) -> NDArray[np.uint8]:
    """As `allocate`, of huge pages where the system has them: for memory that is used from end to end.

    A KV cache of them would take 2 MiB a layer from the first token on: 60 MB and 50 ms for SmolLM2.
    """
    region = _mapped(n_bytes, what)
    if n_bytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a Linux that was built without them
            region.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(region, np.uint8)[:n_bytes]


def _mapped(n_bytes: int, what: str) -> mmap.mmap:
    try:
        return mmap.mmap(-1, max(n_bytes, mmap.PAGESIZE), **_PRIVATE)
    except (OSError, OverflowError) as error:
        raise DoesNotFit(
            f"out of memory: {what}: {format_mebibytes(n_bytes)} wanted", hint="try a smaller model or a smaller -c"
        ) from error


def address_of(array: NDArray[np.generic]) -> int:
    return array.ctypes.data


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
