"""Reads what the system knows about this process: its start, its page faults, its system time and its huge pages.

Values are None where the system does not report them; most of them exist only on Linux.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from msgspec import Struct

from llmrun.base.machine.processor import text_of


class ThreadCosts(Struct, frozen=True):
    """The costs of a thread so far: its page faults without disk access, and its system time in seconds."""

    page_faults: int
    system_s: float


def thread_costs() -> ThreadCosts | None:
    """Return the costs of the calling thread, or None if the system counts only whole processes."""
    if sys.platform != "linux":
        return None
    import resource

    used = resource.getrusage(resource.RUSAGE_THREAD)
    return ThreadCosts(used.ru_minflt, used.ru_stime)


def seconds_since_start(root: Path = Path("/")) -> float | None:
    """Return how long ago this process started, with a resolution of 10 ms, or None if unknown."""
    # The command's name, in parentheses, may contain spaces. The start is field 22, in clock ticks since boot.
    fields = (text_of(root / "proc/self/stat") or "").rpartition(")")[2].split()
    if sys.platform != "linux" or len(fields) < 20:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def huge_and_anonymous_bytes(root: Path = Path("/")) -> tuple[int, int] | None:
    """Return how many bytes of this process are in huge pages, and how many bytes no file backs.

    Returns None if unknown. For a model of 1.1 GB, the kernel takes 6 ms to count the pages.
    """
    sizes = {
        words[0].rstrip(":"): int(words[1]) << 10
        for line in (text_of(root / "proc/self/smaps_rollup") or "").splitlines()
        if len(words := line.split()) == 3 and words[2] == "kB"
    }
    if "AnonHugePages" not in sizes or not sizes.get("Anonymous"):
        return None
    return sizes["AnonHugePages"], sizes["Anonymous"]
