"""Sources from which headers and tensors are read: files, and byte ranges that are fetched, for example over HTTP.

Files are never memory-mapped. If a memory-mapped file is truncated, the process that accesses it is killed by SIGBUS,
whereas a read fails with an ordinary error. Reading is also faster than mapping: reading and packing SmolLM2's 98 MB
takes 42 ms, compared with 81 ms for a mapping and its page faults.

Errors of the operating system are converted to llmrun's errors. This module does not import NumPy.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from llmrun.base.errors import ModelFileError, ModelNotFound, shown

FOLDER = "a folder"
NAME_A_FILE = "name a .gguf file"
_KINDS = (
    (stat.S_ISDIR, FOLDER),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
)

# errors that mistyped paths cause
_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
_TOO_MANY = (errno.EMFILE, errno.ENFILE)  # errors for too many open files


@contextmanager
def opening(path: Path, kind: str = "model file") -> Iterator[None]:
    """Convert any OSError about this file to ModelNotFound or ModelFileError. Messages describe the file as `kind`."""
    try:
        yield
    except OSError as error:
        message = f"{shown(str(path), 300)}: {error.strerror or error}"
        if error.errno in _NO_SUCH_FILE:
            raise ModelNotFound(f"no such {kind}: {message}", hint="Check the path.") from None
        hint = "Raise the limit, such as with ulimit -n 4096." if error.errno in _TOO_MANY else "Check its permissions."
        raise ModelFileError(f"the {kind} cannot be read: {message}", hint=hint) from error


def opened(path: Path) -> FileIO:
    """Open a regular file for reading. Raises ModelNotFound, ModelFileError and OSError."""
    try:
        kind = kind_of(path)
    except ValueError:
        raise ModelNotFound(f"no such model file: {shown(str(path), 300)}: a NUL byte in the name") from None
    if kind == FOLDER:
        raise ModelNotFound(f"not a model file: {shown(str(path), 300)} is a folder", hint="Name the .gguf file in it.")
    if kind:
        # Opening a named pipe would block until a writer opens it.
        raise ModelFileError(f"not a regular file: {shown(str(path), 300)}: {kind}", hint=NAME_A_FILE)
    return path.open("rb", buffering=0)


def kind_of(path: Path) -> str:
    """Describe the kind of file at a path, such as "a folder" or "a device". Returns "" for a regular file.

    Raises OSError if the path does not exist, and ValueError if the path contains a NUL byte.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "a symbolic link that leads to itself", str(path)) from None
    if stat.S_ISREG(mode):
        return ""
    for is_kind, words in _KINDS:
        if is_kind(mode):
            return words
    return "of a kind that cannot be read"


class Source(Protocol):
    """A sequence of bytes that any thread can read at any offset."""

    @property
    def size(self) -> int: ...

    def read(self, offset: int, into: memoryview) -> None:
        """Fill the contiguous buffer `into` with the bytes starting at `offset`. The range must lie within `size`.

        Raises ModelFileError if the bytes no longer exist or cannot be read.
        """

    def check_unchanged(self) -> None:
        """Raise ModelFileError if the bytes may have changed since the source was opened."""

    def check_in_place(self) -> None:
        """Raise ModelFileError if the path may now refer to different bytes."""

    def close(self) -> None:
        """Close the source. Bytes that were already read stay valid. Idempotent."""


class JoinedSource:
    """The concatenated files of one model. Each read must stay within one file, as reads of tensors always do."""

    def __init__(self) -> None:
        self.size = 0
        self._parts: list[Source] = []
        self._begins: list[int] = []

    def append(self, part: Source) -> int:
        """Append an open source and return the offset of its first byte. `close` also closes the appended source."""
        begin = self.size
        self._parts.append(part)
        self._begins.append(begin)
        self.size += part.size
        return begin

    def read(self, offset: int, into: memoryview) -> None:
        index = bisect_right(self._begins, offset) - 1
        self._parts[index].read(offset - self._begins[index], into)

    def check_unchanged(self) -> None:
        for part in self._parts:
            part.check_unchanged()

    def check_in_place(self) -> None:
        for part in self._parts:
            part.check_in_place()

    def close(self) -> None:
        for part in self._parts:
            part.close()


class FileSource:
    """An open file, closed by `close` or when the object is garbage-collected.

    If another file replaces the file under the same name, reads still return the original bytes. If the file is
    modified, `check_unchanged` detects the new size or modification time. If the file is truncated, `read` also fails.
    """

    def __init__(self, path: Path) -> None:
        """Open the file. Raises ModelNotFound and ModelFileError."""
        self._path = path
        self._lock = threading.Lock()
        with opening(path):
            self._file = opened(path)
            self._before = os.fstat(self._file.fileno())
        self.size = self._before.st_size
        self._finalizer = weakref.finalize(self, self._file.close)

    def read(self, offset: int, into: memoryview) -> None:
        """Implement `Source.read`. Raises ValueError if the file is closed."""
        rest = into
        while len(rest):
            try:
                n = self._read_some(offset, rest)
            except OSError as error:
                what = f"{shown(str(self._path), 300)}: at byte {offset}: {error.strerror or error}"
                raise ModelFileError(f"the model file cannot be read: {what}", hint="Check the disk.") from error
            if n == 0:
                raise self._changed(os.fstat(self._file.fileno()))
            rest, offset = rest[n:], offset + n

    def _read_some(self, offset: int, into: memoryview) -> int:
        if sys.platform != "win32":
            return os.preadv(self._file.fileno(), [into], offset)
        with self._lock:  # Windows has no preadv, and all threads share the file position
            self._file.seek(offset)
            return self._file.readinto(into) or 0

    def close(self) -> None:
        self._finalizer()

    def check_unchanged(self) -> None:
        now = os.fstat(self._file.fileno())
        if (now.st_size, now.st_mtime_ns) != (self._before.st_size, self._before.st_mtime_ns):
            raise self._changed(now)

    def check_in_place(self) -> None:
        self.check_unchanged()
        try:
            there = self._path.stat()
        except OSError as error:
            raise self._error(error.strerror or str(error)) from error
        if not os.path.samestat(there, self._before):
            raise self._error("it was replaced by another file")

    def _changed(self, now: os.stat_result) -> ModelFileError:
        return self._error(
            f"was {self.size} bytes, is {now.st_size}" if now.st_size != self.size else "it was written to"
        )

    def _error(self, what: str) -> ModelFileError:
        return ModelFileError(
            f"the model file changed while it was being read: {shown(str(self._path), 300)}: {what}",
            hint="Wait until the download or copy is complete, then try again.",
        )


Fetch = Callable[[int, int], bytes]  # (start, end); the end is exclusive; may raise NetworkError


class RangeSource(Struct):
    """A Source of `size` bytes, which are read by calling `fetch`.

    Each read calls `fetch` once, and nothing is cached. Reading a header from start to end fetches each byte once.
    """

    fetch: Fetch
    size: int
    path: Path

    def read(self, offset: int, into: memoryview) -> None:
        """Implement `Source.read`. Also raises the errors of `fetch`."""
        data = self.fetch(offset, offset + len(into))
        if len(data) != len(into):
            asked = f"bytes {offset} to {offset + len(into)} were requested, but only {len(data)} bytes arrived"
            raise ModelFileError(
                f"the model file cannot be read: {shown(str(self.path), 300)}: {asked}",
                hint="Try again. The connection may have broken, or the server may not support range requests.",
            )
        into[:] = data

    def check_unchanged(self) -> None:
        """Do nothing, because a RangeSource cannot detect changes to a remote file."""

    def check_in_place(self) -> None:
        """Do nothing, because a RangeSource cannot detect changes to a remote file."""

    def close(self) -> None:
        """Do nothing, because a RangeSource holds no open file."""
