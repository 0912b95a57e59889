"""Real control groups, which only root can make."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_CGROUPS = Path("/sys/fs/cgroup")


def parent_of_groups(controller: str) -> Path | None:
    """Return a folder in which this process can make groups with limits, or None."""
    first, second = _CGROUPS / controller, _CGROUPS
    enabled = (second / "cgroup.subtree_control").read_text() if (second / "cgroup.subtree_control").exists() else ""
    found = first if first.is_dir() else second if controller in enabled.split() else None
    return found if found is not None and os.access(found, os.W_OK) else None


needs_groups = pytest.mark.skipif(
    any(parent_of_groups(controller) is None for controller in ("cpu", "memory")),
    reason="this process cannot make control groups",
)


@contextlib.contextmanager
def real_group(controller: str, limit: dict[str, str], within: Path | None = None) -> Iterator[Path]:
    """Make a group with a limit, given by the names of its files in version 1 or 2."""
    parent = within or parent_of_groups(controller)
    assert parent is not None
    group = parent / f"llmrun-{os.getpid()}-{len(limit)}"
    group.mkdir()
    try:
        for name, text in limit.items():
            if (group / name).exists():
                (group / name).write_text(text)
        yield group
    finally:
        for _ in range(50):  # a process that has ended may still be in its group for a moment
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def in_group(group: Path, arguments: list[str]) -> list[str]:
    """Return a command that runs another command in a control group."""
    return ["sh", "-c", 'echo $$ >"$1/cgroup.procs" && shift && exec "$@"', "sh", str(group), *arguments]
