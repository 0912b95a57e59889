"""Returns freed memory to the operating system."""

from __future__ import annotations

import sys
from typing import Any, Final

_M_MMAP_THRESHOLD: Final = -3  # malloc.h
_LARGE: Final = 1 << 20


def return_freed_memory() -> None:
    """Return memory that was freed. glibc would keep much of it for later, in each thread that has allocated some.

    Takes a few milliseconds. Nothing happens without glibc, because other libraries have no such function.
    """
    if (trim := _glibc("malloc_trim")) is not None:
        trim(0)


def return_large_blocks_at_once() -> None:
    """From now on, return blocks of 1 MiB and more as soon as they are freed.

    Otherwise, glibc keeps blocks of up to 32 MiB in its heap after it has seen such sizes. Small blocks between
    them then keep it from shrinking: after five minutes of hostile requests, a server had 204 MB instead of 118 MB.
    The limit is above the 256 KiB that asyncio allocates for each read, which would take 5 us longer.
    """
    if (mallopt := _glibc("mallopt")) is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)


def _glibc(name: str) -> Any:
    """Return a function of glibc, or None."""
    if sys.platform != "linux":
        return None
    import ctypes

    return getattr(ctypes.CDLL(None), name, None)
