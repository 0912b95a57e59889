"""Computes the default number of threads, one for each physical core that this process may run on."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def default_threads() -> int:
    """Return the number of physical cores, up to the CPU limit of the container.

    A second thread on the same core would share its vector units and caches.
    """
    cores = {_core_of(cpu) for cpu in _allowed()}
    return max(1, min(len(cores), _container_limit()))


def most_threads() -> int:
    """Return the number of threads that can run at the same time.

    If there were more threads, they would wait for each other at every op of a step.
    """
    return max(1, min(len(_allowed()), _container_limit()))


def _allowed() -> Collection[int]:
    """Return the logical processors that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _core_of(cpu: int) -> str:
    """Return the kernel's list of the logical processors that share a core with `cpu`, or `cpu` itself if unknown."""
    try:
        return (_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _container_limit() -> int:
    """Return the cgroup's CPU quota in whole processors, or a very large number if there is no quota."""
    try:
        quota, period = _CGROUP_LIMIT.read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return 1 << 20
