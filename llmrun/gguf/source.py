"""Where a header and tensors come from: bytes read when they are asked for, never mapped.

A mapped file that somebody cuts off kills the process that looks at it (SIGBUS). Read, the same is an error like any
other; it is faster too (SmolLM2's 98 MB read and packed in 42 ms, with a mapping's page faults 81). Imports no NumPy.
"""

from __future__ import annotations

import os
import struct
import threading
import weakref
from bisect import bisect_right
from pathlib import Path
from typing import Protocol

from llmrun.errors import ModelFileError
from llmrun.gguf.opening import opened, opening
from llmrun.gguf.problems import shown

_ONE = struct.pack("<f", 1.0)


class Source(Protocol):
    """Bytes that can be read at any place, from any thread."""

    @property
    def size(self) -> int: ...

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into`, n bytes, contiguous, with the bytes from `offset` on; offset + n <= size.

        Raises ModelFileError when they are not there any more, or cannot be read.
        """

    def check_unchanged(self) -> None:
        """Raises ModelFileError when the bytes may not be those of a moment ago."""

    def check_in_place(self) -> None:
        """Raises ModelFileError when who opens the path once more may not find the same bytes."""

    def close(self) -> None:
        """Idempotent. What was read stays."""


class MemorySource:
    """Bytes that are in memory already."""

    def __init__(self, data: bytes) -> None:
        self._bytes = data
        self.size = len(data)

    def read(self, offset: int, into: memoryview) -> None:
        into[:] = self._bytes[offset : offset + len(into)]

    def check_unchanged(self) -> None:
        """They cannot change."""

    def check_in_place(self) -> None:
        """They have no place."""

    def close(self) -> None:
        """There is nothing to let go of."""


class OnesSource:
    """Bytes that nobody has read, in whose place stand floats of 1.0."""

    def __init__(self, size: int) -> None:
        self.size = size

    def read(self, offset: int, into: memoryview) -> None:
        into[:] = (_ONE * (len(into) // len(_ONE) + 1))[: len(into)]

    def check_unchanged(self) -> None:
        """Nothing was read."""

    def check_in_place(self) -> None:
        """Nothing was read."""

    def close(self) -> None:
        """There is nothing to let go of."""


class JoinedSource:
    """The files of one model, laid end to end. A read lies in one of them, as every tensor does."""

    def __init__(self) -> None:
        self.size = 0
        self._parts: list[Source] = []
        self._begins: list[int] = []

    def append(self, part: Source) -> int:
        """Take a file that is open; it is closed with the others. Returns the place where its bytes begin."""
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
    """An open file. It is closed by `close`, or with the last one who holds it.

    A file that is replaced by another of its name goes on as it was; one that is written to is seen at the next
    `check_unchanged` by its size and its time, one that is cut off also by the bytes that are missing.
    """

    def __init__(self, path: Path) -> None:
        """Raises ModelNotFound and ModelFileError."""
        self._path = path
        self._lock = threading.Lock()
        with opening(path):
            self._file = opened(path)
            self._before = os.fstat(self._file.fileno())
        self.size = self._before.st_size
        self._finalizer = weakref.finalize(self, self._file.close)

    def read(self, offset: int, into: memoryview) -> None:
        """See Source.read. Raises ValueError when the file is closed."""
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
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [into], offset)
        with self._lock:  # Windows: the position is everybody's
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
            raise self._error("another file has taken its place")

    def _changed(self, now: os.stat_result) -> ModelFileError:
        return self._error(
            f"was {self.size} bytes, is {now.st_size}" if now.st_size != self.size else "it was written to"
        )

    def _error(self, what: str) -> ModelFileError:
        return ModelFileError(
            f"the model file changed while it was being read: {shown(str(self._path), 300)}: {what}",
            hint="Wait until whatever writes it (a download, a copy) is done, and open it again.",
        )
