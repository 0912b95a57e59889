"""Decides which processes may join a background engine, which may start one unasked, and what engines inherit.

A process that may not join runs the model itself. The reasons are short phrases, for details with -v.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from llmrun.base.errors import LlmrunError
from llmrun.base.machine.cpu_count import allowed_processors
from llmrun.base.machine.memory import address_space_limit, memory_limits, processor_quota
from llmrun.serving.background.place import supported

_INVOKERS = ("SUDO_UID", "SUDO_USER", "DOAS_USER", "PKEXEC_UID")  # who became root
_ROOT = ("", "0", "root")
_FALSE = ("", "0", "false", "no", "off")
_CONTAINER_FILES = (".dockerenv", "run/.containerenv")  # Docker's and Podman's
_CONTAINER_VARIABLES = ("container", "KUBERNETES_SERVICE_HOST")

# The variables that determine which files a name means and how models run. Others may be secrets, such as HF_TOKEN.
_FOLDERS: Final = (
    *("HOME", "USERPROFILE", "APPDATA", "LOCALAPPDATA", "TMPDIR", "TEMP"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),
    *("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "OLLAMA_MODELS"),
    *("LLMRUN_CACHE_DIR", "LLMRUN_CONFIG", "LLMRUN_DATA_DIR"),
)
_OTHERS: Final = ("TZ", "LLMRUN_CPU_LEVEL")


class RunsAlone(LlmrunError):
    """Raised if a client must open the model itself. The message is the reason, for --verbose."""


def reason_not_to_join() -> str:
    """Return why this process must not use a background engine, or "" if it may."""
    if sys.platform == "win32" or not supported():
        return "background engines do not work on this system"
    user = os.geteuid()
    if user != os.getuid() or os.getegid() != os.getgid():
        return "the process has the rights of another user or group"
    if user == 0:
        if any(os.environ.get(name, "") not in _ROOT for name in _INVOKERS):
            return "another user became root, for example with sudo"
        with contextlib.suppress(OSError):
            if Path(os.environ.get("HOME") or "/").stat().st_uid != 0:
                return "root uses the home directory of another user"
    return ""


def reason_not_to_start_unasked(root: Path = Path("/")) -> str:
    """Return why this process must not start a background engine unless the user asks for one, or "" if it may.

    root  the directory that contains the system's files
    """
    if reason := reason_not_to_join():
        return reason
    if os.environ.get("CI", "").lower() not in _FALSE:
        return "the environment variable CI is set"
    if any(os.environ.get(name) for name in _CONTAINER_VARIABLES) or any(
        (root / name).exists() for name in _CONTAINER_FILES
    ):
        return "the process is in a container"
    return _restriction(Standing.of_this_process(root))


def _restriction(standing: Standing) -> str:
    """Return how a process is restricted. An engine that it started would be as slow for others, and outlive it."""
    if standing.priority[1] > 0:
        return "the process has a low priority (nice)"
    if len(standing.processors) < (os.cpu_count() or 1) or standing.quota is not None:
        return "the process may not use all processors"
    if standing.groups or standing.limits != UNLIMITED:
        return "the memory, the CPU time or the files of the process are limited"
    return ""


class Standing(NamedTuple):
    """The resources of this computer that a process may use. Values that the system does not have are empty.

    processors     the logical processors that the process may run on, in ascending order
    priority       the scheduling policy and the niceness
    quota          the CPU time that the control groups allow, in processors, or None
    groups         the control groups whose memory is limited, as "limit in bytes, folder"
    limits         the limits on the address space in bytes, on CPU time in seconds and on the size of files in bytes
    files          the mount namespace, and the device and inode of the root directory
    processes      the namespace of process ids
    users          the namespace of user ids
    """

    processors: tuple[int, ...]
    priority: tuple[int, int]
    quota: float | None
    groups: tuple[str, ...]
    limits: tuple[int | None, int | None, int | None]
    files: str
    processes: str
    users: str

    @classmethod
    def of_this_process(cls, root: Path = Path("/")) -> Self:
        """Return the standing of this process. `root` is the directory that contains Linux's system files."""
        top = Path("/").stat()
        return cls(
            processors=tuple(sorted(allowed_processors())),
            priority=_priority(),
            quota=processor_quota(root),
            groups=tuple(f"{limit}, {folder}" for folder, limit in memory_limits(root).items()),
            limits=_limits(),
            files=f"{_namespace('mnt', root)} {top.st_dev}:{top.st_ino}",
            processes=_namespace("pid", root),
            users=_namespace("user", root),
        )

    def as_json(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in self._asdict().items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the standing that `as_json` described. A missing value differs from all values of others."""
        values = [data.get(name, ...) for name in cls._fields]
        return cls._make(tuple(value) if isinstance(value, list) else value for value in values)


_DIFFERENCES = {
    "processors": "run on different processors",
    "priority": "have different priorities (nice)",
    "quota": "have different CPU limits",
    "groups": "have different memory limits",
    "limits": "have different limits (ulimit)",
    "files": "see different file systems",
    "processes": "see different processes",
    "users": "are in different user namespaces",
}


def difference(client: Standing, engine: Standing) -> str:
    """Return why the engine would not serve the client as the client would serve itself, or "" if it would.

    An engine with stricter limits than the client's does not serve the client either, because it might be slower.
    """
    for name, difference in _DIFFERENCES.items():
        if getattr(client, name) != getattr(engine, name):
            return f"this process and the background engine {difference}"
    return ""


UNLIMITED: Final = (None, None, None)  # the limits of most processes


def _limits() -> tuple[int | None, int | None, int | None]:
    if sys.platform == "win32":
        return UNLIMITED
    import resource

    found = [resource.getrlimit(each)[0] for each in (resource.RLIMIT_CPU, resource.RLIMIT_FSIZE)]
    seconds, size = (None if each == resource.RLIM_INFINITY else each for each in found)
    return address_space_limit(), seconds, size


def _priority() -> tuple[int, int]:
    if sys.platform == "win32":
        return (0, 0)
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if sys.platform == "linux":
        return os.sched_getscheduler(0), niceness
    return 0, niceness


def _namespace(kind: str, root: Path) -> str:
    try:
        return str((root / "proc/self/ns" / kind).readlink())
    except OSError:
        return ""


def inherited() -> dict[str, str]:
    """Return the variables that an engine inherits. Paths are absolute, because engines run in another folder."""
    folders = {name: os.environ[name] for name in _FOLDERS if name in os.environ}
    absolute = {
        name: os.path.abspath(path) if path and not path.startswith("~") else path  # noqa: PTH100  (Path takes longer)
        for name, path in folders.items()
    }
    return {**absolute, **{name: os.environ[name] for name in _OTHERS if name in os.environ}}
