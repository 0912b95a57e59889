"""The memory of this machine: what a process can still allocate, its limits, its peak use, and the memory modules.

Linux's control groups may limit this process, in containers and elsewhere. The limits of a group also apply to the
groups inside it, so all groups count, from this process's own group to the outermost visible group. Control groups v2
has one tree, but v1 has a tree for each controller. Many systems mount both versions of control groups.

The type and speed of the memory modules come from udev, which reads the firmware's tables at boot. Only root may read
the firmware's tables.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from llmrun.base.machine.processor import number_of, text_of

if TYPE_CHECKING:
    import psutil

_GROUP = re.compile(r"^\d+:([^:]*):(/.*)$", re.MULTILINE)  # /proc/self/cgroup
# /proc/self/mountinfo; optional fields end with a hyphen.
_MOUNT = re.compile(r"^\S+ \S+ \S+ (/\S*) (/\S*) .*? - (cgroup2?) \S+ (\S+)$", re.MULTILINE)
_UNLIMITED = 1 << 60  # without a memory limit, version 1 reports the largest multiple of the page size


class MemoryGroup(Struct, frozen=True):
    """A control group whose memory is limited. All values are in bytes.

    used   all memory of the group, including files in the page cache
    files  the page cache, for example of a new model; the kernel frees the page cache when memory is needed
    """

    limit: int
    used: int
    files: int

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used + self.files)


def processor_quota(root: Path = Path("/")) -> float | None:
    """Return the CPU time that this process may use, in processors, or None if there is no limit."""
    texts = [text_of(group / "cpu.max") for group in _groups("", root)]
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    texts += [" ".join(text_of(group / name) or "" for name in names) for group in _groups("cpu", root)]
    quotas = [_quota(text or "") for text in texts]
    return min((quota for quota in quotas if quota is not None), default=None)


def throttled_seconds(root: Path = Path("/")) -> float | None:
    """Return how long the CPU limits of control groups have stopped this process's group so far, or None if unknown."""
    texts = [(text_of(group / "cpu.stat") or "") for kind in ("", "cpu") for group in _groups(kind, root)]
    counts = [dict(line.partition(" ")[::2] for line in text.splitlines()) for text in texts]
    found = [
        int(value) / scale
        for count in counts
        for name, scale in (("throttled_usec", 1e6), ("throttled_time", 1e9))
        if (value := count.get(name, "")).isdecimal()
    ]
    return max(found, default=None)


def memory_groups(root: Path = Path("/")) -> list[MemoryGroup]:
    """Return the groups of this process whose memory is limited."""
    found = []
    for folder, limit in memory_limits(root).items():
        used = number_of(folder / "memory.current") or number_of(folder / "memory.usage_in_bytes") or 0
        counts = dict(line.partition(" ")[::2] for line in (text_of(folder / "memory.stat") or "").splitlines())
        # Version 1 counts the groups inside this group only in its totals.
        pages = (counts.get(f"total_{name}", counts.get(name, "")) for name in ("active_file", "inactive_file"))
        found.append(MemoryGroup(limit, used, sum(int(count) for count in pages if count.isdecimal())))
    return found


def memory_limits(root: Path = Path("/")) -> dict[Path, int]:
    """Return the limits of this process's groups in bytes, by folder. Groups without a limit are left out."""
    # Above memory.high, the kernel slows a group down until the group is hardly usable.
    files = {"": ("memory.max", "memory.high"), "memory": ("memory.limit_in_bytes",)}
    limits = {}
    for controller, names in files.items():
        for folder in _groups(controller, root):
            numbers = [number for name in names if (number := number_of(folder / name)) is not None]
            if any(number < _UNLIMITED for number in numbers):
                limits[folder] = min(numbers)
    return limits


def _quota(text: str) -> float | None:
    """Return QUOTA / PERIOD, or None if the quota is "max" (version 2) or -1 (version 1), which mean no limit."""
    words = text.split()
    if len(words) != 2 or not all(word.isdecimal() and int(word) for word in words):
        return None
    return int(words[0]) / int(words[1])


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups, the innermost first.

    controller  the name of a controller of version 1, or empty for version 2
    """
    path = _path_of_group(controller, root)
    if path is None:
        return
    for mounted, point in _mounts(controller, root):
        inside = path.is_relative_to(mounted) and ".." not in path.parts
        # A group may be outside the mount, as in a container that sees the host's paths.
        folder = point / path.relative_to(mounted) if inside else point
        while folder != point:
            if folder.is_dir():
                yield folder
            folder = folder.parent
        yield point


def _path_of_group(controller: str, root: Path) -> PurePosixPath | None:
    for controllers, path in _GROUP.findall(text_of(root / "proc/self/cgroup") or ""):
        if controller in controllers.split(","):  # "".split(",") is [""], the tree of version 2
            return PurePosixPath(path)
    return None


def _mounts(controller: str, root: Path) -> Iterator[tuple[PurePosixPath, Path]]:
    """Yield (the group at the root of the mount, the mount point) for each mount of the controller."""
    lines = (text_of(root / "proc/self/mountinfo") or "").splitlines()
    # Hosts of containers can have a thousand mounts, for which the regular expression would take 6 ms.
    groups = "\n".join(line for line in lines if " - cgroup" in line)
    for group, point, kind, options in _MOUNT.findall(groups):
        if kind == "cgroup2" if not controller else kind == "cgroup" and controller in options.split(","):
            yield PurePosixPath(group), root / point.replace("\\040", " ").lstrip("/")


def free_memory(*, reserved: int = 0, root: Path = Path("/")) -> int | None:
    """Return how many bytes this process can allocate without swapping, within its limits. Returns None if unknown.

    The limits come from control groups, such as a container's, and from the address space (`ulimit -v`).

    reserved  bytes that are promised to others but not in use yet, and therefore do not count as free
    root      the directory that contains Linux's system files
    """
    bounds = [meminfo_bytes("MemAvailable", root), *(group.free for group in memory_groups(root)), _address_space()]
    return min((max(0, bound - reserved) for bound in bounds if bound is not None), default=None)


def whole_memory(root: Path = Path("/")) -> int | None:
    """Return this machine's memory in bytes, or the container's limit if that is lower. Returns None if unknown."""
    bounds = [meminfo_bytes("MemTotal", root), *(group.limit for group in memory_groups(root))]
    return min((bound for bound in bounds if bound is not None), default=None)


def address_space_limit() -> int | None:
    """Return the limit on this process's address space in bytes (`ulimit -v`), or None if it is unlimited."""
    if sys.platform == "win32":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def _address_space() -> int | None:
    """Return the unused address space in bytes, or None if the address space is unlimited."""
    limit = address_space_limit()
    if limit is None:
        return None
    import psutil

    return max(0, limit - psutil.Process().memory_info().vms)


def meminfo_bytes(wanted: str, root: Path) -> int | None:
    """Return a size in /proc/meminfo, or None if it is missing."""
    for line in (text_of(root / "proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        number = value.split()[:1]
        if name == wanted and number and number[0].isdecimal():
            return int(number[0]) << 10
    return None


_M_MMAP_THRESHOLD: Final = -3  # malloc.h
_MADV_DONTNEED: Final = 4  # sys/mman.h
_LARGE: Final = 1 << 20


def return_freed_memory() -> None:
    """Return freed memory to the system, because glibc would keep much of the memory in per-thread heaps.

    The call takes a few milliseconds. Without glibc, this function does nothing.
    """
    if (trim := _glibc("malloc_trim")) is not None:
        trim(0)


def return_large_blocks_at_once() -> None:
    """Make glibc return blocks of 1 MiB and more to the system as soon as they are freed.

    Otherwise, glibc keeps blocks of up to 32 MiB in its heap after it has seen such sizes. Small blocks between the
    large ones then keep the heap from shrinking: after five minutes of hostile requests, a server used 204 MB instead
    of 118 MB. The limit exceeds the 256 KiB that asyncio allocates for each read; otherwise, reads would take 5 us
    longer.
    """
    if (mallopt := _glibc("mallopt")) is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)


def return_pages(address: int, n_bytes: int) -> None:
    """Return the whole pages in this range to Linux, which fills them with zeros when they are used again.

    The range must be in private memory that no file backs. On other systems, this function does nothing.
    """
    if (advise := _glibc("madvise")) is None:
        return
    import ctypes
    import mmap

    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if size > 0:
        advise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_DONTNEED)


def _glibc(name: str) -> Any:
    """Return a function of glibc, or None if it does not exist."""
    if sys.platform != "linux":
        return None
    import ctypes

    return getattr(ctypes.CDLL(None), name, None)


_PROCESSES = Path("/proc")


def memory_in_use() -> int:
    """Return the memory that this process and its child processes hold now, in bytes."""
    import psutil

    own, total = psutil.Process(), 0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # a child has ended
            total += process.memory_info().rss
    return total


def peak_memory() -> int:
    """Return the peak memory use in bytes, including child processes that are still running.

    If the system does not record the peak of a process, the process's current memory use is counted instead.
    """
    import psutil  # importing psutil takes 15 ms

    own = psutil.Process()
    return _peak(own) + sum(_peak(child) for child in own.children(recursive=True))


def _peak(process: psutil.Process) -> int:
    if sys.platform == "linux":
        # getrusage would be wrong, because on Linux its peak includes the parent's memory at the time of exec.
        try:
            lines = (_PROCESSES / str(process.pid) / "status").read_text().splitlines()
        except OSError:
            return 0  # the process ended before its status was read
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)
    import psutil

    try:
        memory = process.memory_info()
    except psutil.NoSuchProcess:
        return 0
    return int(getattr(memory, "peak_wset", memory.rss))


_UDEV = re.compile(r"^E:MEMORY_DEVICE_(\d+)_([A-Z_]+)=(.*)$", re.MULTILINE)


def memory_facts(root: Path = Path("/")) -> dict[str, str | int | None]:
    """Return `memory_modules` (a count), `memory_type` and `memory_mts`, each None if unknown.

    `memory_mts` is the speed of the slowest module in millions of transfers per second.
    """
    slots: dict[str, dict[str, str]] = {}
    for slot, name, value in _UDEV.findall(text_of(root / "run/udev/data/+dmi:id") or ""):
        slots.setdefault(slot, {})[name] = value
    modules = [slot for slot in slots.values() if slot.get("PRESENT") != "0"]
    speeds = [slot.get("CONFIGURED_SPEED_MTS") or slot.get("SPEED_MTS", "") for slot in modules]
    return {
        "memory_modules": len(modules) or None,
        "memory_type": "/".join(sorted({slot["TYPE"] for slot in modules if "TYPE" in slot})) or None,
        "memory_mts": min((int(speed) for speed in speeds if speed.isdecimal() and speed != "0"), default=None),
    }
