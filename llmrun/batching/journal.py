"""The journal of a run: the records of finished lines, in the order in which they finished.

The first line is a header in JSON. Every other line is `NUMBER CRC RECORD`: the number of the input's line, the CRC-32
of the record, and the record, which is the line of the final output. A line that was cut off by a crash, or that a
failing disk has changed, does not match its CRC and is ignored, so that its request runs again.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from llmrun.errors import DoesNotFit, LlmrunError, UsageError
from llmrun.hub.local.safe_writes import sync_folder

if TYPE_CHECKING:
    from filelock import BaseFileLock

ENDING: Final = ".partial"
_FORMAT: Final = "llmrun batch journal, version 1"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LONGEST_HEADER: Final = 1 << 20


class Place(NamedTuple):
    """The place of a record in the journal, in bytes."""

    offset: int
    size: int


class Journal:
    """An open journal, which only this process uses.

    path     the journal's file
    header   what was written when the run began, or None if it is new
    places   the places of the records by the numbers of their lines
    """

    def __init__(self, path: Path, file: FileIO, lock: BaseFileLock) -> None:
        self.path = path
        self.header: Mapping[str, Any] | None = None
        self.places: dict[int, Place] = {}
        self._file = file
        self._lock = lock
        self._end = 0
        self._is_dirty = False

    @classmethod
    def open(cls, output: Path) -> Self:
        """Open or create the journal of an output file. Raises UsageError and LlmrunError."""
        import filelock

        path = output.with_name(output.name + ENDING)
        lock: BaseFileLock = filelock.FileLock(output.with_name(f".{output.name}.lock"))
        with writing(path):
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                raise UsageError(f"{output}: another run is writing to this file") from None
            except NotImplementedError:  # some network folders have no locks
                lock = filelock.SoftFileLock(lock.lock_file)
                lock.acquire(timeout=0)
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
            journal = cls(path, os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0), lock)
        try:
            journal._load()
        except BaseException:
            journal.close()
            raise
        return journal

    def begin(self, header: Mapping[str, Any]) -> None:
        """Write the header of a new run, and remove all records."""
        self.header = header
        self.places.clear()
        with writing(self.path):
            self._file.truncate(0)
            self._end = 0
            self._append(json.dumps({"format": _FORMAT, **header}, ensure_ascii=False).encode() + b"\n")
        self.sync()

    def add(self, number: int, record: bytes) -> None:
        """Write the record of a finished line. Raises DoesNotFit if the disk is full, and LlmrunError."""
        head = b"%d %08x " % (number, zlib.crc32(record))
        with writing(self.path):
            start = self._end
            self._append(head + record + b"\n")
        self.places[number] = Place(start + len(head), len(record))

    def record(self, number: int) -> bytes:
        """Return the record of a finished line."""
        place = self.places[number]
        self._file.seek(place.offset)
        return self._file.read(place.size)

    def drop(self, number: int) -> None:
        """Forget a record, so that its line runs again. A later record replaces it in the file, too."""
        del self.places[number]

    def sync(self) -> None:
        """Make everything written so far survive a power failure. May run in any thread."""
        if self._is_dirty:
            self._is_dirty = False
            with writing(self.path):
                os.fsync(self._file.fileno())

    def write_output(self, output: Path) -> None:
        """Write all records to the output file in the order of their lines, and remove the journal.

        The file gets its name when it is complete. After this, only `close` may be called.
        """
        self.sync()
        complete = output.with_name(f".{output.name}.complete")
        try:
            with writing(output), complete.open("wb") as stream:
                for number in sorted(self.places):
                    stream.write(self.record(number) + b"\n")
                stream.flush()
                os.fsync(stream.fileno())
            with writing(output):
                complete.replace(output)
                self._file.close()  # Windows cannot remove open files
                self.path.unlink()
                sync_folder(output.parent)
        finally:
            complete.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the journal, and remove it if it is empty. Idempotent."""
        if not self._file.closed:
            is_empty = os.fstat(self._file.fileno()).st_size == 0
            self._file.close()
            if is_empty:
                self.path.unlink(missing_ok=True)
        if self._lock.is_locked:
            self._lock.release()
            Path(self._lock.lock_file).unlink(missing_ok=True)

    def _append(self, data: bytes) -> None:
        """Write at the end of the file. If it fails, the file is as before."""
        written = 0
        try:
            self._file.seek(self._end)
            while written < len(data):
                written += self._file.write(data[written:]) or 0
        except OSError:
            self._file.truncate(self._end)
            raise
        self._end += len(data)
        self._is_dirty = True

    def _load(self) -> None:
        """Read the header and the places of all records. Cut off what a crash has left after the last line."""
        with os.fdopen(os.dup(self._file.fileno()), "rb") as stream:
            stream.seek(0)
            first = stream.readline(_LONGEST_HEADER)
            if not first.endswith(b"\n"):  # the file is new, or a crash came before the first record
                if first and not _FORMAT_BYTES.startswith(first[: len(_FORMAT_BYTES)]):
                    raise self._foreign()
                return
            self.header = self._parsed_header(first)
            self._end = len(first)
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                if (found := _parsed(line)) is not None:
                    number, head = found
                    self.places[number] = Place(self._end + head, len(line) - head - 1)
                self._end += len(line)
        with writing(self.path):
            self._file.truncate(self._end)

    def _parsed_header(self, line: bytes) -> Mapping[str, Any]:
        try:
            header = json.loads(line)
        except ValueError:
            header = None
        if not isinstance(header, dict) or header.pop("format", None) != _FORMAT:
            raise self._foreign()
        return header

    def _foreign(self) -> UsageError:
        return UsageError(
            f"{self.path}: not a journal of llmrun batch", hint="move the file, or choose another output with -o"
        )


_FORMAT_BYTES: Final = json.dumps({"format": _FORMAT})[:-1].encode()


def read_records(output: Path) -> Iterator[bytes]:
    """Yield the records of a complete output file. Raises UsageError if it cannot be read."""
    try:
        with output.open("rb") as stream:
            for line in stream:
                yield line.removesuffix(b"\n")
    except OSError as error:
        raise UsageError(f"{output}: cannot be read: {error.strerror or error}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an OSError from writing to `path` to an LlmrunError with a hint."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DoesNotFit(
                f"disk: {path.parent}: full, {_free_text(path.parent)}",
                hint="free up space, then run the same command again to continue",
            ) from error
        raise LlmrunError(f"{error.filename or path}: cannot be written: {error.strerror or error}") from error


def _free_text(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free:,} bytes free"
    except OSError as error:
        return f"free space unknown ({error.strerror})"


def _parsed(line: bytes) -> tuple[int, int] | None:
    """Return the number of a journal line and the size of everything before its record, or None if it is damaged."""
    number, _, rest = line.partition(b" ")
    crc, _, record = rest.partition(b" ")
    if not number.isdigit() or len(crc) != 8 or b"%08x" % zlib.crc32(record[:-1]) != crc:
        return None
    return int(number), len(line) - len(record)
