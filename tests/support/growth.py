"""Measure how running time grows with input size. Unlike a time in seconds, the ratio is the same on any machine."""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time

TIMES = 8  # ratio of the larger input's size to the smaller one's


def growth(work: Callable[[int], object], size: int) -> float:
    """Return the CPU time of `work` on an input of `size`, divided by its time on an eighth of that.

    The ratio is about 8 if `work` is linear and 64 if it is quadratic. Each time is the minimum of three.
    """
    smaller, larger = (min(_seconds(work, n) for _ in range(3)) for n in (size // TIMES, size))
    return larger / smaller


def _seconds(work: Callable[[int], object], size: int) -> float:
    started = thread_time()
    work(size)
    return thread_time() - started
