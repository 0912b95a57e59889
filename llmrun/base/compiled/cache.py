"""The on-disk cache of compiled kernels: a folder with one file per key.

An entry consists of the SHA-256 hash of the key and the object, followed by the object. The hash is checked before
every use. In a test with 60 single-bit flips in a cached object, 6 led to a crash and one to wrong results. If the
folder cannot be used, kernels are compiled again and a single warning is issued, but no error is raised.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from llmrun.base import folders
from llmrun.base.errors import KernelWarning
from llmrun.base.folders import O_BINARY

if sys.platform != "win32":
    import fcntl

_DIGEST_BYTES = 32
_SUFFIX = ".o"
_NAMES = r"[0-9a-f]{64}\.o|\.[0-9a-f]{64}(\.\d+)?"  # entries, and temporary files that become entries
_MAX_BYTES = 16 << 20  # limit on the size of an entry; the largest kernels are a hundred times smaller
_POLL_SECONDS = 0.02
_MAX_WAIT_SECONDS = 60.0  # how long to wait for another process, which may hang; compiling takes a second
_NOTED_S = 86_400.0  # a use is recorded at most once a day, so that most starts write nothing
_UNUSED_S = 30 * 86_400.0


class CacheSurvey(Struct, frozen=True):
    """A summary of the cache: the number of entries, how many of them are damaged, and the total size in bytes."""

    folder: Path
    entries: int
    damaged: int
    n_bytes: int


def survey() -> CacheSurvey:
    """Check every entry. Raises OSError if the folder exists but cannot be read."""
    cache = KernelCache()
    n_bytes = 0
    paths = cache.paths()
    for path in paths:
        cache.read(path.stem, note_use=False)
        with contextlib.suppress(OSError):  # another process may have deleted the entry
            n_bytes += path.stat().st_size
    return CacheSurvey(cache.folder, len(paths), len(cache.damaged), n_bytes)


def unused_files(now: float) -> list[tuple[Path, int]]:
    """Return the paths and sizes of the cache files that have not been used for 30 days.

    Most of these files belong to other versions of llmrun, Python or Numba, or were left by killed processes. Only the
    time of the last use shows this, because a key does not tell which version compiled its entry. Raises OSError if
    the folder exists but cannot be read.
    """
    folder = KernelCache().folder
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        with contextlib.suppress(FileNotFoundError):  # another process has just renamed or deleted the file
            status = path.stat(follow_symlinks=False)
            if re.fullmatch(_NAMES, path.name) and stat.S_ISREG(status.st_mode) and now - status.st_mtime > _UNUSED_S:
                found.append((path, status.st_size))
    return found


class KernelCache:
    """Reads and writes the cache folder while kernels are loaded. Problems are collected, and `warn` reports them."""

    def __init__(self) -> None:
        self.folder = folders.cache_folder("kernels")
        self.damaged: set[str] = set()
        self._trouble: OSError | None = None

    def paths(self) -> list[Path]:
        """Return the paths of all entries. Raises OSError if the folder exists but cannot be read."""
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if path.suffix == _SUFFIX)

    def read(self, key: str, *, note_use: bool = True) -> bytes | None:
        """Return the object stored in an entry, or None if the entry is missing or damaged.

        An entry's modification time records when the entry was last used, because many systems do not update the access
        times of files.
        """
        path = self._path(key)
        entry = b""
        try:
            found = path.stat()
            if stat.S_ISREG(found.st_mode) and found.st_size <= _MAX_BYTES:  # reading a named pipe would block
                entry = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            entry = b""  # an unreadable entry counts as damaged
        digest, image = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
        if _digest(key, image) == digest:
            if note_use and time.time() - found.st_mtime > _NOTED_S:
                with contextlib.suppress(OSError):  # the folder is read-only, or belongs to another user
                    os.utime(path)
            return image
        self.damaged.add(key)
        return None

    def make(self, key: str, compile_object: Callable[[], bytes], given_up: threading.Event) -> bytes:
        """Return the object that `compile_object` produces, and store it as an entry.

        If another process is already compiling the same entry, wait for its object. If the wait takes too long or
        `given_up` is set, call `compile_object` anyway. Exceptions raised by `compile_object` are propagated.
        """
        deadline = time.monotonic() + _MAX_WAIT_SECONDS
        while True:
            try:
                claim = self._claim(key)
            except OSError as error:
                self._trouble = self._trouble or error
                return compile_object()
            if claim is not None:
                return self._make_claimed(key, claim, compile_object)
            if given_up.wait(_POLL_SECONDS) or time.monotonic() > deadline:
                return compile_object()

    def warn(self) -> None:
        """Issue one KernelWarning about all problems with the folder. Python may be set to raise warnings as errors."""
        if self._trouble is not None:
            where = self._trouble.filename2 or self.folder
            words = f"cannot save compiled kernels, so every start compiles them: {where}: {self._trouble.strerror}"
        elif self.damaged:
            words = f"found damaged kernels and compiled them again: {len(self.damaged)} in {self.folder}"
        else:
            return
        warnings.warn(words, KernelWarning, stacklevel=4)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _claim(self, key: str) -> BinaryIO | None:
        """Lock and open the file that will become the entry. Returns None if another process has locked the file.

        The system releases the lock when the process that holds it ends. If a process is killed while it holds a lock,
        the next process that needs the entry takes over the file. Raises OSError.
        """
        path = self._claim_path(key)
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | O_BINARY, 0o600)
        file = os.fdopen(descriptor, "wb")
        try:
            if _lock(descriptor) and os.path.samestat(os.fstat(descriptor), path.stat()):
                return file
        except FileNotFoundError:
            pass  # another process has already renamed the file to the entry
        except BaseException:
            file.close()
            raise
        file.close()
        return None

    def _claim_path(self, key: str) -> Path:
        # Windows does not support these locks, so two processes may create the same entry, and the last to finish wins.
        return self.folder / (f".{key}" if sys.platform != "win32" else f".{key}.{os.getpid()}")

    def _make_claimed(self, key: str, claim: BinaryIO, compile_object: Callable[[], bytes]) -> bytes:
        kept = False
        try:
            image = self.read(key)  # another process may have created the entry since the first read
            if image is None:
                image = compile_object()
                kept = self._save(key, claim, image)
            return image
        finally:
            _close_on_windows(claim)
            if not kept:  # otherwise, another process may already be reusing the file's old name
                with contextlib.suppress(OSError):
                    self._claim_path(key).unlink()
            with contextlib.suppress(OSError):  # if the disk is full, flushing the buffer fails
                claim.close()

    def _save(self, key: str, claim: BinaryIO, image: bytes) -> bool:
        """Write the locked file, then rename it to the entry, so that entries are always complete."""
        try:
            claim.truncate(0)
            claim.write(_digest(key, image) + image)
            claim.flush()
            os.fsync(claim.fileno())
            _close_on_windows(claim)
            self._claim_path(key).replace(self._path(key))
        except OSError as error:
            if sys.platform != "win32" or not self._path(key).exists():  # another process may have saved the entry
                self._trouble = self._trouble or error
            return False
        return True


def _digest(key: str, image: bytes) -> bytes:
    return hashlib.sha256(key.encode() + image).digest()


def _close_on_windows(claim: BinaryIO) -> None:
    """Close the file on Windows, which cannot rename or remove open files. On other systems, keep the lock."""
    if sys.platform == "win32":
        with contextlib.suppress(OSError):  # the disk is full
            claim.close()


def _lock(file: int) -> bool:
    """Try to lock a file. Returns True on success, and always on file systems that do not support locks."""
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
    return True
