"""How the work on an input grows with it: a ratio of two times tells what no time in seconds can, on any machine."""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time

TIMES = 8  # as large as the smaller input


def growth(work: Callable[[int], object], size: int) -> float:
    """CPU time of `work` on an input of `size` over that of an eighth: about 8 where every byte is looked at once, 64
    where every byte is looked at for each. Of each the least of three."""
    smaller, larger = (min(_seconds(work, n) for _ in range(3)) for n in (size // TIMES, size))
    return larger / smaller


def _seconds(work: Callable[[int], object], size: int) -> float:
    started = thread_time()
    work(size)
    return thread_time() - started
