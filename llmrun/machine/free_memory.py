"""Reports how much memory this process can still allocate before the system starts to kill processes."""

from __future__ import annotations

from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_memory(*, reserved: int = 0) -> int | None:
    """Return the bytes available without swapping, up to the container's memory limit. Returns None if unknown.

    reserved  bytes that are promised to others, but not in use yet; they do not count as free
    """
    bounds = [max(0, bound - reserved) for bound in (_available(), _container_headroom()) if bound is not None]
    return min(bounds, default=None)


def whole_memory() -> int | None:
    """Return this machine's memory in bytes, or the container's limit if that is lower. Returns None if unknown."""
    bounds = [bound for bound in (_meminfo_bytes("MemTotal"), _container_limit()) if bound is not None]
    return min(bounds, default=None)


def _available() -> int | None:
    return _meminfo_bytes("MemAvailable")


def _meminfo_bytes(wanted: str) -> int | None:
    try:
        for line in _MEMORY.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == wanted:
                return int(value.split()[0]) << 10
    except (OSError, ValueError, IndexError):
        return None
    return None


def _container_headroom() -> int | None:
    limit = _container_limit()
    if limit is None:
        return None
    try:
        return max(0, limit - int((_CGROUP / "memory.current").read_text()) + _file_pages())
    except (OSError, ValueError):
        return None


def _container_limit() -> int | None:
    try:
        return int((_CGROUP / "memory.max").read_text())  # int() raises ValueError for "max", which means no limit
    except (OSError, ValueError):
        return None


def _file_pages() -> int:
    """Return the size in bytes of the container's page cache, which may hold a model that was just downloaded.

    These pages count as used memory, but the kernel frees them as soon as memory is needed.
    """
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(counts.get("active_file", 0)) + int(counts.get("inactive_file", 0))
