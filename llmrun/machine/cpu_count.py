"""How many threads to use: the physical cores this process may run on."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def default_threads() -> int:
    """One thread a physical core: a second on the same core shares its vector units and its caches. Never more than
    the share of the machine that a container was given."""
    cores = {_core_of(cpu) for cpu in _allowed()}
    return max(1, min(len(cores), _container_limit()))


def most_threads() -> int:
    """How many can run at the same time: with more they wait for each other, at every op of a step."""
    return max(1, min(len(_allowed()), _container_limit()))


def _allowed() -> Collection[int]:
    """The logical processors this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _core_of(cpu: int) -> str:
    """The logical processors that share a core with this one, as the kernel lists them; itself where it does not."""
    try:
        return (_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _container_limit() -> int:
    """Whole processors of a cgroup's quota; very many where there is none."""
    try:
        quota, period = _CGROUP_LIMIT.read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return 1 << 20
