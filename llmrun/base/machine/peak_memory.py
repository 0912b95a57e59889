"""Measures the peak memory use of this process and its child processes."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

_PROCESSES = Path("/proc")


def peak_memory() -> int:
    """Return the peak memory use in bytes, including child processes that are still running.

    If the system does not record the peak of a process, its current memory use is counted instead.
    """
    own = psutil.Process()
    return _peak(own) + sum(_peak(child) for child in own.children(recursive=True))


def _peak(process: psutil.Process) -> int:
    if sys.platform == "linux":
        # getrusage would be wrong, because on Linux its peak includes the parent's memory at the time of exec.
        try:
            lines = (_PROCESSES / str(process.pid) / "status").read_text().splitlines()
        except OSError:
            return 0  # the process ended in the meantime
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)
    try:
        memory = process.memory_info()
    except psutil.NoSuchProcess:
        return 0
    return int(getattr(memory, "peak_wset", memory.rss))
