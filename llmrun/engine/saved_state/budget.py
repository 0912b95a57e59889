"""Limits the disk space that saved states take up. The least recently used files are removed first."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ENDING: Final = ".kv"
NEW_ENDING: Final = f"{ENDING}.new"  # of files that are being written
SHARE_OF_FREE_SPACE: Final = 0.1
_ABANDONED_S: Final = 30 * 86_400


@dataclass(frozen=True, slots=True)
class StoredState:
    """A file with a saved state, or one that a killed writer left behind. `used` is the time of its last use."""

    path: Path
    n_bytes: int
    used: float


class Budget:
    """Limits the saved states in some folders to `limit` bytes, and to a tenth of what would be free without them."""

    def __init__(self, folders: Sequence[Path], limit: int) -> None:
        self._folders = folders
        self._limit = limit

    def make_room(self, path: Path, added: int) -> bool:
        """Make room for `added` more bytes in a file by removing other files. Returns False if that is not enough.

        Nothing is removed if it would not be enough. Raises OSError.
        """
        stored = stored_states(self._folders)
        own = sum(each.n_bytes for each in stored if each.path == path)
        others = sorted((each for each in stored if each.path != path), key=lambda each: each.used)
        total = sum(each.n_bytes for each in stored)
        free = shutil.disk_usage(path.parent).free
        allowed = min(self._limit, int((total + free) * SHARE_OF_FREE_SPACE))
        if own + added > allowed:
            return False
        while others and total + added > allowed:
            oldest = others.pop(0)
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                oldest.path.unlink()
            total -= oldest.n_bytes
        return True


def abandoned(conversations: Path, prefixes: Path, now: float) -> list[StoredState]:
    """Return the states of conversations that no longer exist, and all files that have not been used for 30 days."""
    lost = [
        each
        for each in stored_states([conversations])
        if not each.path.with_suffix(".jsonl").exists() or now - each.used > _ABANDONED_S
    ]
    return lost + [each for each in stored_states([prefixes]) if now - each.used > _ABANDONED_S]


def stored_states(folders: Sequence[Path]) -> list[StoredState]:
    """Return all saved states in these folders and in the folders directly inside them."""
    return [stored for folder in folders for stored in _scan(folder, levels=2)]


def _scan(folder: Path, levels: int) -> Iterator[StoredState]:
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            if levels > 1:
                yield from _scan(Path(entry.path), levels - 1)
        elif entry.name.endswith((ENDING, NEW_ENDING)):
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                status = entry.stat(follow_symlinks=False)
                yield StoredState(Path(entry.path), status.st_size, status.st_mtime)


def note_use(path: Path) -> None:
    """Record that a file was used now."""
    with contextlib.suppress(OSError):  # the file can be read but belongs to another user, or was just removed
        os.utime(path)
