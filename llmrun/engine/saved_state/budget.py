"""The files with saved states: how to recognize and open them, and a limit on the disk space that they take up.

The least recently used files are removed first. Importing this module is fast.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, Protocol

from llmrun.base.folders import O_BINARY, O_NONBLOCK

if TYPE_CHECKING:
    from llmrun.backends.base import KVCache


class SavedPrefixes(Protocol):
    """Prefixes of the KV cache that are saved in files. Problems with files are reported and never raised."""

    def longest(self, tokens: list[int], tenant: str) -> int:
        """Return the length of the tenant's longest saved prefix of `tokens`."""

    def load(self, kv: KVCache, seq: int, tokens: list[int], tenant: str) -> int:
        """Replace the contents of a sequence with the longest saved prefix of `tokens`.

        Returns how many tokens the cache kept, which may be fewer if a file is damaged. Raises KVFull.
        """

    def save(self, kv: KVCache, seq: int, tokens: Sequence[int], n: int, tenant: str) -> bool:
        """Save some of the first n tokens of a sequence. Caches that cannot save a prefix save all tokens.

        Returns whether more tokens may remain to be saved.
        """


BEGINNING: Final = b"llmrun state "
MAGIC: Final = BEGINNING + b"2\n\0"  # includes the version of the format


def may_overwrite(path: Path, beginning: bytes = BEGINNING) -> bool:
    """Return whether a file is missing or empty, or begins like a saved state of any version. Raises OSError."""
    try:
        with open_regular(path) as file:
            return file.read(len(beginning)) in (beginning, b"")
    except FileNotFoundError:
        return True


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading. Raises OSError, including for directories, pipes and devices."""
    descriptor = os.open(path, os.O_RDONLY | O_BINARY | O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(descriptor, "rb")  # noqa: PTH123  pathlib cannot open a descriptor


ENDING: Final = ".kv"
NEW_ENDING: Final = f"{ENDING}.new"  # the suffix of files that are being written
SHARE_OF_FREE_SPACE: Final = 0.1
_ABANDONED_S: Final = 30 * 86_400


@dataclass(frozen=True, slots=True)
class StoredState:
    """A file with a saved state, or a file left behind by a killed writer. `used` is the time of the last use."""

    path: Path
    n_bytes: int
    used: float


class Budget:
    """Limits the saved states in some folders to `limit` bytes, and to a tenth of the otherwise free space."""

    def __init__(self, folders: Sequence[Path], limit: int) -> None:
        self._folders = folders
        self._limit = limit

    def make_room(self, path: Path, added: int, kept: Collection[Path] = ()) -> bool:
        """Make room for `added` more bytes in a file by removing other files. Returns False if this would not suffice.

        If removing files would not free enough space, no file is removed. Raises OSError.

        kept  other files that must not be removed
        """
        stored, needed = stored_states(self._folders), {path, *kept}
        own = sum(each.n_bytes for each in stored if each.path in needed)
        others = sorted((each for each in stored if each.path not in needed), key=lambda each: each.used)
        total = sum(each.n_bytes for each in stored)
        free = shutil.disk_usage(path.parent).free
        allowed = min(self._limit, int((total + free) * SHARE_OF_FREE_SPACE))
        if own + added > allowed:
            return False
        while others and total + added > allowed:
            oldest = others.pop(0)
            with contextlib.suppress(FileNotFoundError):  # another process has removed the file
                oldest.path.unlink()
            total -= oldest.n_bytes
        return True


def abandoned(conversations: Path, prefixes: Path, now: float) -> list[StoredState]:
    """Return the states of conversations that no longer exist, and all files that have not been used for 30 days."""
    lost = [
        each
        for each in stored_states([conversations])
        if not _conversation_of(each.path).exists() or now - each.used > _ABANDONED_S
    ]
    return lost + [each for each in stored_states([prefixes]) if now - each.used > _ABANDONED_S]


def _conversation_of(state: Path) -> Path:
    """Return the file of the conversation to which a saved state belongs. Names of conversations contain no dots."""
    return state.with_name(f"{state.name.partition('.')[0]}.jsonl")


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
            with contextlib.suppress(FileNotFoundError):  # another process has removed the file
                status = entry.stat(follow_symlinks=False)
                yield StoredState(Path(entry.path), status.st_size, status.st_mtime)


_BETWEEN_USES_NS: Final = 1000


def note_uses(paths: Sequence[Path]) -> None:
    """Set the time of the last use of files to about the current time, so that the last file is removed first."""
    now = time.time_ns()
    for order, path in enumerate(reversed(paths)):
        used = now + order * _BETWEEN_USES_NS
        with contextlib.suppress(OSError):  # the file belongs to another user, or was just removed
            os.utime(path, ns=(used, used))
