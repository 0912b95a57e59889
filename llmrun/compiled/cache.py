"""Compiled kernels on disk: a folder of entries by key, each of them right or not used.

An entry is the sha256 of key and object, then the object. It is checked before every use, because of 60 single-bit
flips in a cached object 6 crashed and one gave wrong results. Whatever is wrong with the folder costs a compile and one
warning, never an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmrun import folders
from llmrun.errors import KernelWarning

if sys.platform != "win32":
    import fcntl

_DIGEST_BYTES = 32
_SUFFIX = ".o"
_MOST_BYTES = 16 << 20  # of an entry; the largest are a hundred times smaller
_POLL_SECONDS = 0.02
_PATIENCE_SECONDS = 60.0  # with a process that makes an entry and may be stopped; a kernel takes it a second


@dataclass(frozen=True, slots=True)
class CacheSurvey:
    """What is in the folder: entries, those of them that are damaged, and bytes of all."""

    folder: Path
    entries: int
    damaged: int
    n_bytes: int


def survey() -> CacheSurvey:
    """Check every entry. Raises OSError where the folder is there and cannot be read."""
    cache = KernelCache()
    n_bytes = 0
    paths = cache.paths()
    for path in paths:
        cache.read(path.stem)
        with contextlib.suppress(OSError):  # gone meanwhile
            n_bytes += path.stat().st_size
    return CacheSurvey(cache.folder, len(paths), len(cache.damaged), n_bytes)


class KernelCache:
    """The folder as one load of kernels sees it: trouble is collected here, and told at the end."""

    def __init__(self) -> None:
        self.folder = folders.cache_folder() / "kernels"
        self.damaged: set[str] = set()
        self._trouble: OSError | None = None

    def paths(self) -> list[Path]:
        """Of all entries. Raises OSError where the folder is there and cannot be read."""
        try:
            return sorted(path for path in self.folder.iterdir() if path.suffix == _SUFFIX)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, key: str) -> bytes | None:
        """The object of an entry; None when there is none, or none that can be trusted."""
        path = self._path(key)
        entry = b""
        try:
            found = path.stat()
            if stat.S_ISREG(found.st_mode) and found.st_size <= _MOST_BYTES:  # of a pipe, a read would never return
                entry = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            entry = b""  # what cannot be read is as good as damaged
        digest, image = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
        if _digest(key, image) == digest:
            return image
        self.damaged.add(key)
        return None

    def make(self, key: str, compile_object: Callable[[], bytes], given_up: threading.Event) -> bytes:
        """The object that `compile_object` makes, kept as an entry; or another process's, if that was at it first.

        Raises what `compile_object` raises; it is called also when somebody has given up waiting.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
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
        """Tell, in one warning, what was wrong with the folder. Raises it where warnings are errors."""
        if self._trouble is not None:
            where = self._trouble.filename2 or self.folder
            words = f"compiled kernels cannot be kept, every start compiles them: {where}: {self._trouble.strerror}"
        elif self.damaged:
            words = f"compiled kernels were damaged, and were compiled again: {len(self.damaged)} in {self.folder}"
        else:
            return
        warnings.warn(words, KernelWarning, stacklevel=4)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _claim(self, key: str) -> int | None:
        """Descriptor of the file that is to become the entry, locked, or None while another process has it.

        The lock goes with its process, and the next who wants the entry takes the file of one that was killed. Raises
        OSError.
        """
        path = self._claim_path(key)
        self.folder.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
        try:
            if _lock(file) and os.path.samestat(os.fstat(file), path.stat()):
                return file
        except FileNotFoundError:
            pass  # it has become the entry
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        return None

    def _claim_path(self, key: str) -> Path:
        # Without locks (Windows), two processes may make the same entry; the later one stays.
        return self.folder / (f".{key}" if sys.platform != "win32" else f".{key}.{os.getpid()}")

    def _make_claimed(self, key: str, claim: int, compile_object: Callable[[], bytes]) -> bytes:
        kept = False
        try:
            image = self.read(key)  # it may have come since it was looked for
            if image is None:
                image = compile_object()
                kept = self._keep(key, claim, image)
            return image
        finally:
            if not kept:  # else the name is free already, and may be another's
                with contextlib.suppress(OSError):
                    self._claim_path(key).unlink()
            os.close(claim)

    def _keep(self, key: str, claim: int, image: bytes) -> bool:
        """All or nothing: the claimed file is written, and then takes the entry's name."""
        try:
            os.ftruncate(claim, 0)
            with os.fdopen(claim, "wb", closefd=False) as file:
                file.write(_digest(key, image) + image)
                file.flush()
                os.fsync(claim)
            self._claim_path(key).replace(self._path(key))
        except OSError as error:
            self._trouble = self._trouble or error
            return False
        return True


def _digest(key: str, image: bytes) -> bytes:
    return hashlib.sha256(key.encode() + image).digest()


def _lock(file: int) -> bool:
    """Whether nobody else has it. A file system without locks lets everybody have it."""
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
    return True
