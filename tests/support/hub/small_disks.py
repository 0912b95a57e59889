"""Disks that are full soon: a file system of a few megabytes, or the system's device that is always full."""

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
    """`folder` lies on it. `mounted`: a disk of its own, so that other processes find it full too."""

    folder: Path
    mounted: bool
    allowance: int  # bytes that may still be written, where nothing could be mounted

    def make_room(self) -> None:
        """As much as a test needs."""
        self.allowance = 1 << 40
        (self.folder / "ballast").unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(folder: Path, room: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    """A disk on which about `room` bytes are free. Mounting needs a privilege: without it every write of a download
    beyond the room goes to /dev/full, which refuses as a full disk does."""
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


def mount(folder: Path, size: int) -> bool:
    """Put a disk of this size there, if this user may."""
    try:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=True)
