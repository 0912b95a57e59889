"""Reports how much memory this process can still allocate before the system starts to kill processes."""

from __future__ import annotations

import sys
from pathlib import Path

from llmrun.base.machine.cgroups import memory_groups
from llmrun.base.machine.system_files import text_of


def free_memory(*, reserved: int = 0, root: Path = Path("/")) -> int | None:
    """Return the bytes available without swapping, up to the limits of this process. Returns None if unknown.

    The limits are those of control groups, such as a container's, and of the address space (`ulimit -v`).

    reserved  bytes that are promised to others, but not in use yet; they do not count as free
    root      the directory that contains Linux's system files
    """
    bounds = [_meminfo_bytes("MemAvailable", root), *(group.free for group in memory_groups(root)), _address_space()]
    return min((max(0, bound - reserved) for bound in bounds if bound is not None), default=None)


def whole_memory(root: Path = Path("/")) -> int | None:
    """Return this machine's memory in bytes, or the container's limit if that is lower. Returns None if unknown."""
    bounds = [_meminfo_bytes("MemTotal", root), *(group.limit for group in memory_groups(root))]
    return min((bound for bound in bounds if bound is not None), default=None)


def address_space_limit() -> int | None:
    """Return the limit on this process's address space in bytes (`ulimit -v`), or None if it is unlimited."""
    if sys.platform == "win32":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def _address_space() -> int | None:
    """Return how much of the address space is left, or None if it is unlimited."""
    limit = address_space_limit()
    if limit is None:
        return None
    import psutil

    return max(0, limit - psutil.Process().memory_info().vms)


def _meminfo_bytes(wanted: str, root: Path) -> int | None:
    for line in (text_of(root / "proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        number = value.split()[:1]
        if name == wanted and number and number[0].isdecimal():
            return int(number[0]) << 10
    return None
