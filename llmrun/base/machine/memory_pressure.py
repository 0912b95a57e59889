"""Memory pressure: whether a process in the background should give its memory back to other programs.

The machine and each control group with a limit are checked separately. In each of them, memory is short below a bound
of 1 GB or 8 %, whichever is more. Where 1 GB is more than a quarter of the memory, the bound is this quarter.

A program may fill the memory between two checks. The kernel then kills the process with the highest score, so a process
in the background should call `volunteer_for_oom`.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llmrun.base.amounts import format_bytes
from llmrun.base.machine.memory import MemoryGroup, meminfo_bytes, memory_groups
from llmrun.base.machine.processor import text_of

_LEAST_FREE: Final = 10**9
_LEAST_SHARE: Final = 0.08
_MOST_SHARE: Final = 0.25  # where memory is small
_MOST_WAITING: Final = 10.0  # percent of the time

# A check takes 0.7 ms of CPU time on Linux, which is 0.14 % of a core every 0.5 s, and 0.035 % every 2 s.
_PAUSE: Final = 2.0
_SHORT_PAUSE: Final = 0.5
_HORIZON: Final = 10.0  # seconds; if memory shrinks so fast that the bound is reached in this time, check more often
_LEAST_INTERVAL: Final = 0.1  # seconds; two checks that are closer do not show how fast memory shrinks

# Free memory in multiples of the bound.
_NEAR: Final = 1.5  # below this, checks are more frequent, and no engine is started
# Above this, waiting programs lack something else. A container that has reached its limit waits, too, and the system
# reports its waiting for the whole machine, however much memory is free.
_AMPLE: Final = 4.0

_MACOS_LEVELS = {2: "warning", 4: "critical"}


@dataclass(frozen=True, slots=True)
class MemoryReaders:
    """Functions that read the state of the memory.

    groups   the whole machine, if its memory is known, and the control groups of this process with limited memory
    waiting  the percentage of the last 10 s in which at least one program waited for memory, or 0 if unknown
    level    macOS's level of memory pressure, or 0 if unknown
    """

    groups: Callable[[], Sequence[MemoryGroup]]
    waiting: Callable[[], float] = lambda: 0.0
    level: Callable[[], int] = lambda: 0


def linux_readers(root: Path = Path("/")) -> MemoryReaders:
    """Return readers of Linux's system files, which are in the directory `root`."""

    def groups() -> list[MemoryGroup]:
        whole, free = meminfo_bytes("MemTotal", root), meminfo_bytes("MemAvailable", root)
        machine = [] if whole is None or free is None else [MemoryGroup(whole, whole - free, 0)]
        return machine + memory_groups(root)

    def waiting() -> float:
        words = (text_of(root / "proc/pressure/memory") or "").split()  # some avg10=0.00 avg60=0.00 ...
        with suppress(ValueError, IndexError):  # the file is missing or empty if the kernel does not measure pressure
            return float(words[1].removeprefix("avg10="))
        return 0.0

    return MemoryReaders(groups, waiting)


def psutil_readers(level: Callable[[], int] = lambda: 0) -> MemoryReaders:
    """Return readers for macOS and Windows.

    Windows has a notification for low memory, but sends it only when at most 64 MB are left.
    """

    def groups() -> list[MemoryGroup]:
        import psutil

        memory = psutil.virtual_memory()
        return [MemoryGroup(memory.total, memory.total - memory.available, 0)]

    return MemoryReaders(groups, level=level)


def macos_level(libc: Any = None) -> int:
    """Return macOS's level of memory pressure: 1 (normal), 2 (warning), 4 (critical), or 0 if unknown."""
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    read = (libc or ctypes.CDLL(None)).sysctlbyname
    failed = read(b"kern.memorystatus_vm_pressure_level", ctypes.byref(value), ctypes.byref(size), None, 0)
    return 0 if failed else value.value


def system_readers() -> MemoryReaders:
    """Return the readers for this system."""
    if sys.platform == "linux":
        return linux_readers()
    return psutil_readers(macos_level) if sys.platform == "darwin" else psutil_readers()


class PressureWatch:
    """Checks from time to time whether this process should give its memory back.

    Either call `wait` in a thread, or call `reason` from a loop at least every `pause` seconds.

    pause  seconds until the next check, which is sooner if memory is shrinking fast or nearly short
    """

    def __init__(self, readers: MemoryReaders | None = None) -> None:
        self.pause = _PAUSE
        self._readers = readers or system_readers()
        self._closed = threading.Event()
        self._last_look = (-math.inf, math.inf)  # the time, and the free memory in multiples of the bound

    def reason(self) -> str:
        """Return why this process should give its memory back, or an empty string if memory is not short."""
        groups = self._readers.groups()
        scarcest = min(groups, key=_relative, default=None)
        left = math.inf if scarcest is None else _relative(scarcest)
        self._choose_pause(left)
        if scarcest is not None and left < 1:
            return f"{format_bytes(scarcest.free)} of {format_bytes(scarcest.limit)} memory left"
        return _other_reason(self._readers, left)

    def wait(self, seconds: float) -> str:
        """Wait until memory is short, and return the reason, or an empty string after this time or after `close`."""
        end = time.monotonic() + seconds
        while not self._closed.is_set():
            if reason := self.reason():
                return reason
            if (rest := end - time.monotonic()) <= 0:
                break
            self._closed.wait(min(rest, self.pause))
        return ""

    def close(self) -> None:
        """End all calls of `wait`. Thread-safe."""
        self._closed.set()

    def _choose_pause(self, left: float) -> None:
        (before, left_before), now = self._last_look, time.monotonic()
        self._last_look = now, left
        lost = left_before - left if left_before < math.inf else 0.0
        expected = left - lost * _HORIZON / max(now - before, _LEAST_INTERVAL)
        self.pause = _SHORT_PAUSE if left < _NEAR or expected < 1 else _PAUSE


def fits_beside(engine_bytes: int, readers: MemoryReaders | None = None) -> bool:
    """Return whether a process that will allocate this much memory can stay in the background.

    Such a process takes at most half of the memory, and leaves enough free that it does not have to leave at once.
    """
    readers = readers or system_readers()
    groups = readers.groups()
    return (
        bool(groups)  # otherwise, the process would not notice when memory becomes short
        and all(engine_bytes <= group.limit // 2 for group in groups)
        and all(group.free - engine_bytes >= _NEAR * _bound(group) for group in groups)
        and not _other_reason(readers, min(map(_relative, groups)))
    )


def volunteer_for_oom(root: Path = Path("/")) -> None:
    """Make Linux kill this process first if memory runs out. Child processes inherit the setting.

    On other systems, this function does nothing.

    The score of a process is its share of the memory in thousandths plus this adjustment. With an adjustment of 600, a
    program that allocates 90 % of the memory would be killed instead, unless this process has more than 30 %.
    """
    with suppress(OSError), (root / "proc/self/oom_score_adj").open("r+") as file:  # some containers forbid writing
        file.write("1000")


def _bound(group: MemoryGroup) -> float:
    return max(min(_LEAST_FREE, _MOST_SHARE * group.limit), _LEAST_SHARE * group.limit)


def _relative(group: MemoryGroup) -> float:
    """Return the free memory in multiples of the bound."""
    return group.free / max(_bound(group), 1)


def _other_reason(readers: MemoryReaders, left: float) -> str:
    """Return another reason to give memory back if the free memory is `left` times the bound, or an empty string."""
    level = _MACOS_LEVELS.get(readers.level())
    if level is not None:
        return f"macOS reports memory pressure: {level}"
    if left < _AMPLE and (waiting := readers.waiting()) > _MOST_WAITING:
        return f"programs wait for memory {waiting:.0f} % of the time"
    return ""
