"""The most memory that this process and those it started ever held."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

_PROCESSES = Path("/proc")


def peak_memory() -> int:
    """Bytes. Of processes that it started, those that still run; where the system keeps no peak of theirs, what they
    hold now."""
    own = psutil.Process()
    return _peak(own) + sum(_peak(child) for child in own.children(recursive=True))


def _peak(process: psutil.Process) -> int:
    if sys.platform == "linux":
        # Not getrusage: at exec Linux counts what the parent held.
        try:
            lines = (_PROCESSES / str(process.pid) / "status").read_text().splitlines()
        except OSError:
            return 0  # it has just ended
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)
    try:
        memory = process.memory_info()
    except psutil.NoSuchProcess:
        return 0
    return int(getattr(memory, "peak_wset", memory.rss))
