"""The load of this machine: how much CPU time other programs, the host and a container's limit took from this process.

Measurements record the load before and after the timed work. Only the processors that this process may use count. On
Linux, CPU times have a resolution of 10 ms for each processor, so a few tenths of a second are needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import psutil

from llmrun.base.machine.cpu_count import allowed_processors
from llmrun.base.machine.memory import processor_quota, throttled_seconds

# The share of CPU time from which other virtual machines disturb a measurement. Benchmarks have a lower limit, because
# they compare small differences.
_STOLEN: Final = 0.05
_TAKEN: Final = 0.15  # processors per thread that other programs may use, plus half of the processors without a thread
_THROTTLED: Final = 0.05  # the share of the time in which a container's CPU limit stopped all threads
_FULL: Final = 0.9  # a process that used this share of its container's CPU limit was stopped for its own use
_GLANCE_S: Final = 0.2


@dataclass(slots=True)
class Load:
    """CPU times in seconds, of an interval or, in a reading, since the machine or the process started.

    processors  number of processors that this process may use
    busy        time in which these processors ran any program, or None if unknown
    own         CPU time of this process
    stolen      time in which the host ran other virtual machines instead
    throttled   time in which the CPU limit of this process's container stopped the process
    """

    processors: int
    wall: float = 0.0
    busy: float | None = 0.0
    own: float = 0.0
    stolen: float = 0.0
    throttled: float = 0.0

    @classmethod
    def empty(cls) -> Load:
        """Return the load of an interval that has not begun."""
        return cls(len(allowed_processors()))

    def add(self, before: Load, after: Load) -> None:
        """Add the interval between two readings."""
        for name in (field.name for field in fields(self) if field.name != "processors"):
            values = [getattr(one, name) for one in (self, before, after)]
            setattr(self, name, None if None in values else values[0] + values[2] - values[1])


def reading(root: Path = Path("/")) -> Load:
    """Return the current CPU times.

    root  the directory that contains Linux's system files
    """
    allowed = set(allowed_processors())
    found = Load(len(allowed), time.perf_counter(), None, time.process_time(), 0.0, throttled_seconds(root) or 0.0)
    times = query_or_none(lambda: psutil.cpu_times(percpu=True))
    if times is None:
        return found
    mine = [one for number, one in enumerate(times) if number in allowed]
    found.busy = sum(_counted(one) - one.idle - _of(one, "iowait") - _of(one, "steal") for one in mine)
    found.stolen = sum(_of(one, "steal") for one in mine)
    return found


def stolen_time() -> dict[str, float | None]:
    """Return the steal time of all logical processors since boot, and their total time.

    Steal time is the time in which the host ran other virtual machines instead of this one.
    """
    times = query_or_none(lambda: psutil.cpu_times())
    if times is None or not hasattr(times, "steal"):
        return {"stolen_seconds": None, "processor_seconds": None}
    return {"stolen_seconds": _of(times, "steal"), "processor_seconds": round(_counted(times), 2)}


def query_or_none(query: Callable[[], Any]) -> Any:
    """Return the result of a system query, or None if the system cannot answer it."""
    try:
        return query()
    except (OSError, psutil.Error, NotImplementedError, AttributeError, RuntimeError, ValueError):
        return None


def _counted(times: Any) -> float:
    return float(sum(times)) - _of(times, "guest") - _of(times, "guest_nice")  # user time already includes guest time


def _of(times: Any, name: str) -> float:
    return float(getattr(times, name, 0.0))


@contextmanager
def watched(load: Load, root: Path = Path("/")) -> Iterator[None]:
    """Add the time that the body of the `with` statement takes to `load`."""
    before = reading(root)
    yield
    load.add(before, reading(root))


def disturbance(load: Load, threads: int, root: Path = Path("/")) -> str:
    """Say in a few words what took CPU time from `threads` threads of this process, or return "".

    Other programs disturb little as long as they run on processors that the threads do not need.
    """
    if load.wall <= 0:
        return ""
    others = max(0.0, load.busy - load.own) / load.wall if load.busy is not None else 0.0
    if others > max(0, load.processors - threads) / 2 + _TAKEN * threads:
        return f"other programs used {others:.1f} of {load.processors} CPUs"
    if (stolen := load.stolen / (load.wall * load.processors)) > _STOLEN:
        return f"other virtual machines took {stolen:.0%} of the CPU time"
    quota = processor_quota(root)
    if quota is not None and load.throttled > _THROTTLED * load.wall and load.own < _FULL * quota * load.wall:
        return f"other programs used the container's limit of {quota:g} CPUs"
    return ""


def disturbance_now(threads: int) -> str:
    """Watch the machine for a moment, and return the same words as `disturbance`."""
    load = Load.empty()
    with watched(load):
        time.sleep(_GLANCE_S)
    return disturbance(load, threads)
