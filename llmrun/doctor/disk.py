"""What a folder holds and whether it can be written, also one that is not there yet; nothing is left in it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

_MOST_FILES = 200_000  # a network file system tells of ten thousand in a second


@dataclass(frozen=True, slots=True)
class Use:
    """Files below a folder and their bytes, `whole` when all were counted; `free`: bytes that its disk has left."""

    files: int
    n_bytes: int
    free: int | None
    whole: bool


def use_of(folder: Path) -> Use:
    files = n_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            if files >= _MOST_FILES:
                return Use(files, n_bytes, _free(folder), False)
            with contextlib.suppress(OSError):  # gone meanwhile
                n_bytes += os.lstat(os.path.join(parent, name)).st_size  # noqa: PTH118 - ten times as fast
                files += 1
    return Use(files, n_bytes, _free(folder), True)


def can_write(folder: Path) -> bool:
    """Whether a file can be made in it, or in the folder in which it would be made. By making one: permissions do not
    tell of a disk that is full or read-only."""
    try:
        with tempfile.TemporaryFile(dir=_nearest(folder), prefix=".llmrun-doctor-"):
            return True
    except OSError:
        return False


def shown_path(path: Path) -> str:
    """With `~` for the home folder."""
    with contextlib.suppress(RuntimeError, ValueError):  # no home folder; not below it
        return str(Path("~") / path.relative_to(Path.home()))
    return str(path)


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(_nearest(folder)).free
    except OSError:
        return None


def _nearest(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    for path in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            if path.exists():
                return path
    return folder
