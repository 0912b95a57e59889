"""Reads the limits that Linux's control groups place on this process, in containers and elsewhere.

The limits of a group also apply to the groups inside it, so all groups count, from this process's own to the outermost
visible one. Version 2 has one tree of groups. Version 1 has a tree for each controller. Many systems mount both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from llmrun.base.machine.system_files import number_of, text_of

_GROUP = re.compile(r"^\d+:([^:]*):(/.*)$", re.MULTILINE)  # /proc/self/cgroup
# /proc/self/mountinfo; optional fields end with a hyphen.
_MOUNT = re.compile(r"^\S+ \S+ \S+ (/\S*) (/\S*) .*? - (cgroup2?) \S+ (\S+)$", re.MULTILINE)
_UNLIMITED = 1 << 60  # without a memory limit, version 1 reports the largest multiple of the page size


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A group whose memory is limited. All values are in bytes.

    used   all memory of the group, including files in the page cache
    files  page cache, for example of a model that was just downloaded; the kernel frees it when memory is needed
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


def memory_groups(root: Path = Path("/")) -> list[MemoryGroup]:
    """Return the groups of this process whose memory is limited."""
    found = []
    for group in _groups("", root):
        # Above memory.high, the kernel slows a group down until it is hardly usable.
        limits = [number_of(group / name) for name in ("memory.max", "memory.high")]
        found.append(_memory_group(limits, group / "memory.current", group / "memory.stat", ""))
    for group in _groups("memory", root):
        limits = [number_of(group / "memory.limit_in_bytes")]
        found.append(_memory_group(limits, group / "memory.usage_in_bytes", group / "memory.stat", "total_"))
    return [group for group in found if group is not None]


def _memory_group(limits: list[int | None], usage: Path, stat: Path, prefix: str) -> MemoryGroup | None:
    known = [limit for limit in limits if limit is not None and limit < _UNLIMITED]
    if not known:
        return None
    counts = dict(line.partition(" ")[::2] for line in (text_of(stat) or "").splitlines())
    pages = (counts.get(f"{prefix}{state}_file", "") for state in ("active", "inactive"))
    files = sum(int(count) for count in pages if count.isdecimal())
    return MemoryGroup(min(known), number_of(usage) or 0, files)


def _quota(text: str) -> float | None:
    """Return QUOTA / PERIOD. The quota is "max" (version 2) or -1 (version 1) if there is none."""
    words = text.split()
    if len(words) != 2 or not all(word.isdecimal() and int(word) for word in words):
        return None
    return int(words[0]) / int(words[1])


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's groups, the innermost first.

    controller  the name of a controller of version 1, or empty for version 2
    """
    path = _path_of_group(controller, root)
    if path is None:
        return
    for mounted, point in _mounts(controller, root):
        inside = path.is_relative_to(mounted) and ".." not in path.parts
        # Otherwise, the group is outside the mount, as in a container that sees the host's paths.
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
    """Yield (the group at the root of the mount, the folder where it is mounted)."""
    for group, point, kind, options in _MOUNT.findall(text_of(root / "proc/self/mountinfo") or ""):
        if kind == "cgroup2" if not controller else kind == "cgroup" and controller in options.split(","):
            yield PurePosixPath(group), root / point.replace("\\040", " ").lstrip("/")
