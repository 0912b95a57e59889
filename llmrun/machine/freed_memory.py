"""Returns freed memory to the operating system."""

from __future__ import annotations

import sys


def return_freed_memory() -> None:
    """Return memory that was freed. glibc would keep much of it for later, in each thread that has allocated some.

    Takes a few milliseconds. Nothing happens without glibc, because other libraries have no such function.
    """
    if sys.platform == "linux":
        import ctypes

        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
