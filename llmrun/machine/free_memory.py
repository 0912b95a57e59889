"""How much memory this process may still take before the system begins to kill."""

from __future__ import annotations

from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int | None:
    """Bytes: what the system could give without swapping, at most what is left of a container's share. None where
    the system does not say."""
    bounds = [bound for bound in (_available(), _container_room()) if bound is not None]
    return min(bounds, default=None)


def whole_memory() -> int | None:
    """Bytes of this machine, at most a container's share. None where the system does not say."""
    bounds = [bound for bound in (_line_of_memory("MemTotal"), _container_limit()) if bound is not None]
    return min(bounds, default=None)


def _available() -> int | None:
    return _line_of_memory("MemAvailable")


def _line_of_memory(wanted: str) -> int | None:
    try:
        for line in _MEMORY.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == wanted:
                return int(value.split()[0]) << 10
    except (OSError, ValueError, IndexError):
        return None
    return None


def _container_room() -> int | None:
    limit = _container_limit()
    if limit is None:
        return None
    try:
        return max(0, limit - int((_CGROUP / "memory.current").read_text()) + _file_pages())
    except (OSError, ValueError):
        return None


def _container_limit() -> int | None:
    try:
        return int((_CGROUP / "memory.max").read_text())  # "max" is no limit
    except (OSError, ValueError):
        return None


def _file_pages() -> int:
    """Of a container: pages that hold what files hold, such as a model that was just downloaded. They count as used,
    but go as soon as memory is wanted."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(counts.get("active_file", 0)) + int(counts.get("inactive_file", 0))
