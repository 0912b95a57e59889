"""Memory for weights, the KV cache and activations: anonymous, aligned to pages, zero until touched."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from llmrun.errors import DoesNotFit

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HUGE_PAGE = 2 << 20


def allocate(n_bytes: int, what: str) -> NDArray[np.uint8]:
    """uint8[n_bytes] of zeros, page aligned; huge pages where the system has them and the size is worth one.

    `what` names the memory in the DoesNotFit that is raised when there is none.
    """
    try:
        region = mmap.mmap(-1, max(n_bytes, mmap.PAGESIZE))
    except (OSError, OverflowError) as error:
        raise DoesNotFit(
            f"out of memory: {what}: {n_bytes / 2**20:.0f} MiB wanted", hint="try a smaller model or a smaller -c"
        ) from error
    if n_bytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(region, np.uint8)[:n_bytes]


def address_of(array: NDArray[np.generic]) -> int:
    return array.ctypes.data


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
