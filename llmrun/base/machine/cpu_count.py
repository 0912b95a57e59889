"""Computes the default number of threads: one for each fast physical core that this process may run on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from llmrun.base.machine.memory import processor_quota
from llmrun.base.machine.processor import number_of, text_of

_ENOUGH_FAST = 4  # about this many cores are needed to read memory at full speed
_SLOW = 0.75  # a core is slow if its capacity is below this share of the fastest core's


def default_threads(root: Path = Path("/")) -> int:
    """Return the number of physical cores, up to the CPU limit of the container.

    A second thread on the same core would share the core's vector units and caches. Slow cores do not count if there
    are enough fast cores, because the fast cores would wait for them at every op.

    root  the directory that contains Linux's system files
    """
    allowed = allowed_processors()
    fast = _cores_of(_fast(allowed, root), root)
    cores = fast if len(fast) >= _ENOUGH_FAST else _cores_of(allowed, root)
    return max(1, min(len(cores), _container_limit(root)))


def most_threads(root: Path = Path("/")) -> int:
    """Return the number of threads that can run at the same time.

    Additional threads would make all threads wait for each other at every op of a step.
    """
    return max(1, min(len(allowed_processors()), _container_limit(root)))


def allowed_processors() -> Collection[int]:
    """Return the logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        with contextlib.suppress(OSError):  # a sandbox may forbid this call
            allowed: Collection[int] = os.sched_getaffinity(0)
            return allowed
    return range(os.cpu_count() or 1)


def _cores_of(cpus: Collection[int], root: Path) -> set[str]:
    """Return the physical cores of the given processors, each identified by Linux's list of the core's processors.

    A processor whose core is unknown counts as a separate core.
    """
    return {text_of(_cpu(cpu, root) / "topology" / "thread_siblings_list") or str(cpu) for cpu in cpus}


def _fast(cpus: Collection[int], root: Path) -> Collection[int]:
    """Return the processors in `cpus` that are on fast cores, or all of `cpus` if all cores are of the same kind.

    Linux lists Intel's performance cores in a file, and reports a capacity for Arm's cores and, since Linux 6.12, for
    Intel's cores. A processor whose capacity is unknown counts as fast.
    """
    if performance := _numbers_in(text_of(root / "sys/devices/cpu_core/cpus") or "").intersection(cpus):
        return performance
    known = {cpu: found for cpu in cpus if (found := number_of(_cpu(cpu, root) / "cpu_capacity")) is not None}
    most = max(known.values(), default=0)
    return [cpu for cpu in cpus if known.get(cpu, most) >= _SLOW * most]


def _cpu(cpu: int, root: Path) -> Path:
    return root / f"sys/devices/system/cpu/cpu{cpu}"


def _numbers_in(text: str) -> set[int]:
    """Return the numbers in a list in Linux's notation, such as "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _container_limit(root: Path) -> int:
    """Return the CPU limit in whole processors, or a very large number if there is no limit."""
    quota = processor_quota(root)
    return 1 << 20 if quota is None else max(1, int(quota))
