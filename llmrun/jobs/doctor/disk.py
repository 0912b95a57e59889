"""Measures the disk usage of a folder and checks whether it is writable. The folder need not exist."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

_MOST_FILES = 200_000  # stop counting here, as network file systems list only about 10,000 files per second


@dataclass(frozen=True, slots=True)
class Use:
    """Disk usage of a folder.

    files    the number of files in the folder and its subfolders
    n_bytes  their total size
    free     free bytes on the folder's disk; None if unknown
    whole    whether all files were counted
    """

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
            with contextlib.suppress(OSError):  # the file was deleted after it was listed
                n_bytes += os.lstat(os.path.join(parent, name)).st_size  # noqa: PTH118 - ten times as fast as pathlib
                files += 1
    return Use(files, n_bytes, _free(folder), True)


def can_write(folder: Path) -> bool:
    """Return whether a file can be created in a folder, or in the nearest existing folder above it.

    The check creates and deletes a temporary file, because permissions do not reveal that a disk is full or read-only.
    """
    try:
        with tempfile.TemporaryFile(dir=_nearest(folder), prefix=".llmrun-doctor-"):
            return True
    except OSError:
        return False


def shown_path(path: Path) -> str:
    """Return a path as text, with the home folder shortened to `~`."""
    with contextlib.suppress(RuntimeError, ValueError):  # there is no home folder, or the path is outside it
        return str(Path("~") / path.relative_to(Path.home()))
    return str(path)


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(_nearest(folder)).free
    except OSError:
        return None


def _nearest(folder: Path) -> Path:
    """Return the folder itself, or the nearest existing folder above it."""
    for path in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            if path.exists():
                return path
    return folder
