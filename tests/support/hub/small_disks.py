"""Disks that fill up quickly: a tmpfs of a few megabytes, or /dev/full."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llmrun.hub.transfer import partial_file

_SIZE = 8 << 20


@dataclass
class SmallDisk:
    """A nearly full disk that holds `folder`. If `mounted`, it is a real file system, so other processes see it full
    too."""

    folder: Path
    mounted: bool
    allowance: int  # bytes that may still be written if mounting failed

    def make_room(self) -> None:
        """Free as much space as any test needs."""
        self.allowance = 1 << 40
        (self.folder / "ballast").unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(folder: Path, room: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    """Yield a disk with about `room` bytes free.

    Mounting needs a privilege. Without it, all writes of a download beyond `room` go to /dev/full, which fails like a
    full disk.
    """
    folder.mkdir()
    if mount(folder, _SIZE):
        try:
            (folder / "ballast").write_bytes(bytes(_SIZE - room))
            yield SmallDisk(folder, True, 0)
        finally:
            unmount(folder)
        return
    disk = SmallDisk(folder, False, room)

    class Limited(io.FileIO):
        def write(self, data: Any, /) -> int:
            view = memoryview(data)
            if len(view) > disk.allowance:
                with io.FileIO("/dev/full", "w") as full:
                    full.write(view)
            disk.allowance -= len(view)
            return super().write(view)

    def opened(path: Path, more: int = 0) -> io.FileIO:
        return Limited(os.open(path, os.O_RDWR | more, 0o666), "r+")

    monkeypatch.setattr(partial_file, "_opened", opened)
    yield disk


@contextlib.contextmanager
def mounted_disk(folder: Path, size: int, room: int) -> Iterator[SmallDisk]:
    """Yield a real disk of `size` bytes with `room` bytes free, which child processes see too.

    Skips the test if this user may not mount disks; `--no-skips` turns that into a failure.
    """
    folder.mkdir()
    if not mount(folder, size):
        pytest.skip("mounting needs a privilege")
    try:
        (folder / "ballast").write_bytes(bytes(size - room))
        yield SmallDisk(folder, True, 0)
    finally:
        unmount(folder)


def mount(folder: Path, size: int) -> bool:
    """Mount a tmpfs of this size at the folder and return True, or return False if this user may not."""
    try:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=True)
