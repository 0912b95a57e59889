"""The journal of a run: the records of finished lines, in the order in which they finished.

The first line is a JSON header. Every other line is `NUMBER CRC RECORD`: the number of the input's line, the CRC-32 of
the number and the record, and the record, which is a line of the final output. A line that was truncated by a crash or
corrupted by a failing disk does not match its CRC and is ignored, so its request runs again.

The functions at the top write the files of a run next to the user's own files, and never modify the user's files.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from llmrun.base.errors import DoesNotFit, LlmrunError, UsageError
from llmrun.base.folders import O_BINARY, O_NOFOLLOW, O_NONBLOCK, cache_folder
from llmrun.base.machine import shell
from llmrun.hub.local.safe_writes import alone_with, in_use, require_space, sync_folder

if TYPE_CHECKING:
    from filelock import BaseFileLock

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNRESOLVABLE: Final = 1921  # Windows: ERROR_CANT_RESOLVE_FILENAME
_CONTINUE: Final = "free up space, then run the same command again to continue"
MORE_ROOM: Final = "free up space, or write to a folder on a larger disk"

Stamp = list[int]


def stamp_of(path: Path) -> Stamp | None:
    """Return a file's size and modification time, which reveal a rewritten file, or None if the file does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]


def resolved(path: Path) -> Path:
    """Return the target of a path after following links, so that the target is replaced and the link is kept.

    Raises UsageError for circular links.
    """
    try:
        path.stat()  # since Python 3.13, Path.resolve accepts symlink loops
    except OSError as error:
        if error.errno == errno.ELOOP or getattr(error, "winerror", 0) == _UNRESOLVABLE:
            raise UsageError(f"{path}: the symbolic links form a loop") from None
    return path.resolve() if path.is_symlink() else path


@contextmanager
def new_file(path: Path, check: Callable[[], None] = lambda: None, *, hint: str = _CONTINUE) -> Iterator[FileIO]:
    """Yield a file that replaces `path` if the block succeeds. The file's `name` is its current path.

    check  called just before the file is replaced; may raise an exception
    hint   the advice to the user if the disk is full
    Raises DoesNotFit if the disk is full, and LlmrunError for other errors.
    """
    temporary = path.with_name(f".{path.name}.llmrun-{secrets.token_hex(8)}")
    with writing(path, hint):
        file = FileIO(temporary, "x+")
    try:
        with writing(path, hint), file, in_use(temporary):
            yield file
            os.fsync(file.fileno())
        check()
        with writing(path, hint):
            temporary.replace(path)
            sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def check_absent(path: Path) -> None:
    """Raise UsageError if the file already exists, or if the file's folder does not exist."""
    if os.path.lexists(path):
        raise UsageError(f"{path}: already exists", hint="choose another name, or remove it first")
    if not path.parent.is_dir():
        create = shell.words(["mkdir", "-p", str(path.parent)])
        raise UsageError(f"{path}: there is no folder {path.parent}", hint=f"create it: {create}")


@contextmanager
def absent_file(path: Path, n_bytes: int = 0) -> Iterator[FileIO]:
    """Yield a file as `new_file` does, but never replace an existing file. Remove leftovers of killed processes.

    n_bytes  the size of the complete file, if known

    Raises UsageError if the file exists or its folder does not, DoesNotFit if the disk is too small, and LlmrunError.
    """
    check_absent(path)
    remove_leftovers(path)
    require_space(path.parent, n_bytes, path.name, hint=MORE_ROOM)
    with new_file(path, lambda: check_absent(path), hint=MORE_ROOM) as file:
        yield file


def remove_leftovers(*paths: Path) -> None:
    """Remove temporary files of `new_file` that killed processes left behind."""
    for path in paths:
        name = re.compile(rf"\.{re.escape(path.name)}(\.partial)?\.llmrun-[0-9a-f]{{16}}")
        with suppress(OSError):  # leftovers in an unreadable folder can be ignored
            for found in path.parent.iterdir():
                if name.fullmatch(found.name) and stat.S_ISREG(found.lstat().st_mode):
                    with alone_with([found]) as busy:
                        if busy is None:
                            found.unlink()


@contextmanager
def writing(path: Path, hint: str = _CONTINUE) -> Iterator[None]:
    """Convert an OSError, raised while writing to `path`, to an LlmrunError. `hint` is the advice for a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DoesNotFit(f"disk: {path.parent}: full, {_free_text(path.parent)}", hint=hint) from error
        raise LlmrunError(f"{path}: cannot be written: {error.strerror or error}") from error


def _free_text(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free:,} bytes free"
    except OSError as error:
        return f"free space unknown ({error.strerror})"


_ENDING: Final = ".partial"
_FORMAT: Final = "llmrun batch journal, version 1"
_LONGEST_HEADER: Final = 1 << 20
_MOST_DIGITS: Final = 18  # digits of the longest line number


class Place(NamedTuple):
    """The location of a record in the journal, in bytes."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        """The offset of the end of the record's line."""
        return self.offset + self.size + 1


class Journal:
    """The journal of an output file, for the exclusive use of this process.

    path     the journal's file
    header   the header that was written when the run began, or None if no run has begun
    places   maps line numbers to the places of their records
    """

    def __init__(self, output: Path, lock: BaseFileLock | None) -> None:
        self.path = journal_path(output)
        self.header: Mapping[str, Any] | None = None
        self.places: dict[int, Place] = {}
        self._output = output
        self._lock = lock
        self._file: FileIO | None = None
        self._end = 0
        self._is_dirty = False

    @classmethod
    def open(cls, output: Path, check: Callable[[], None] = lambda: None, *, is_private: bool = False) -> Self:
        """Open the journal of an output file, if the journal exists. Raises UsageError and LlmrunError.

        check       called often; may raise an exception to stop
        is_private  True if no other process knows the file, which then needs no lock
        """
        journal = cls(output, None if is_private else _locked(output))
        try:
            remove_leftovers(output)
            if os.path.lexists(journal.path):
                journal._load(check)
        except BaseException:
            journal.close()
            raise
        return journal

    def begin(self, header: Mapping[str, Any], records: Iterable[tuple[int, bytes]] = ()) -> None:
        """Replace the journal with a new run's journal, which may already contain records.

        If the process is killed at any moment, either the old journal or the complete new journal remains.
        """
        places: dict[int, Place] = {}
        with new_file(self.path) as new:
            end = _append(new, 0, json.dumps({"format": _FORMAT, **header}).encode() + b"\n")
            for number, record in records:
                places[number] = _put(new, end, number, record)
                end = places[number].end
        if self._file is not None:
            self._file.close()
        self._file = _opened(self.path)
        self.header, self.places, self._end = header, places, end

    def add(self, number: int, record: bytes) -> None:
        """Write the record of a finished line. Raises DoesNotFit if the disk is full, otherwise LlmrunError."""
        with writing(self.path):
            place = self.places[number] = _put(self._open_file, self._end, number, record)
        self._end = place.end
        self._is_dirty = True

    def record(self, number: int) -> bytes:
        """Return the record of a finished line."""
        place = self.places[number]
        self._open_file.seek(place.offset)
        return self._open_file.read(place.size)

    def drop(self, number: int) -> None:
        """Discard a record, so that its line runs again. The line's next record replaces the old record in the file."""
        del self.places[number]

    def sync(self) -> None:
        """Flush all written data to disk, so that it survives a power failure. Any thread may call this method."""
        if self._is_dirty:
            self._is_dirty = False
            with writing(self.path):
                os.fsync(self._open_file.fileno())

    def write_output(self, check: Callable[[], None] = lambda: None) -> None:
        """Write all records to the output file in the order of their lines, and remove the journal.

        The output file receives its final name once complete. After this call, only `close` may be called. Raises
        LlmrunError if the output is not the file that the run may replace.

        check  called often; may raise an exception to stop
        """
        self.sync()

        def check_output() -> None:
            if stamp_of(self._output) != self.header_value("replaces"):
                raise LlmrunError(
                    f"{self._output}: another program has changed this file in the meantime",
                    hint="move the file away, then run the same command again",
                )

        check_output()
        with new_file(self._output, check_output) as stream:
            for number in sorted(self.places):
                check()
                stream.write(self.record(number) + b"\n")
        self.remove()

    def is_written(self, check: Callable[[], None]) -> bool:
        """Return whether the output has all records, because a process was killed just before removing the journal.

        check  called often; may raise an exception to stop
        """
        if self.header is None or not self._output.is_file():
            return False
        with self._output.open("rb") as stream:
            for number in sorted(self.places):
                check()
                record = self.record(number) + b"\n"
                if stream.read(len(record)) != record:
                    return False
            return not stream.read(1)

    def remove(self) -> None:
        """Remove the journal. After this call, only `close` may be called."""
        with writing(self.path):
            self._open_file.close()  # Windows cannot remove open files
            self.path.unlink(missing_ok=True)

    def header_value(self, name: str) -> Any:
        """Return a value of the header, or None if the value is missing."""
        return None if self.header is None else self.header.get(name)

    def close(self) -> None:
        """Close the journal. This method is idempotent."""
        if self._file is not None:
            self._file.close()
        if self._lock is not None:
            self._lock.release()

    @property
    def _open_file(self) -> FileIO:
        assert self._file is not None, "no run has begun"
        return self._file

    def _load(self, check: Callable[[], None]) -> None:
        """Read the header and the locations of all records, and truncate an incomplete last line left by a crash."""
        with writing(self.path):
            self._file = _opened(self.path)
        with os.fdopen(os.dup(self._file.fileno()), "rb") as stream:
            stream.seek(0)
            first = stream.readline(_LONGEST_HEADER)
            header = _parsed_header(first)
            if header is None:
                hint = "move the file, or choose another output with -o"
                raise UsageError(f"{self.path}: not a journal of llmrun batch", hint=hint)
            self.header = header
            self._end = len(first)
            for line in stream:
                check()
                if not line.endswith(b"\n"):
                    break
                if (found := _parsed(line)) is not None:
                    number, head = found
                    self.places[number] = Place(self._end + head, len(line) - head - 1)
                self._end += len(line)
        with writing(self.path):
            self._file.truncate(self._end)


def journal_path(output: Path) -> Path:
    """Return the path of the journal of an output file."""
    return output.with_name(output.name + _ENDING)


def recorded_header(output: Path) -> Mapping[str, Any] | None:
    """Return the header of an output's journal without opening the journal for writing, or None without a journal."""
    try:
        with _opened(journal_path(output), os.O_RDONLY) as file:
            return _parsed_header(file.read(_LONGEST_HEADER).partition(b"\n")[0] + b"\n")
    except (OSError, LlmrunError):  # opening the journal for writing reports the reason
        return None


def read_records(output: Path) -> Iterator[bytes]:
    """Yield the records of a complete output file. Raises UsageError if the file cannot be read."""
    try:
        with output.open("rb") as stream:
            for line in stream:
                yield line.removesuffix(b"\n")
    except OSError as error:
        raise UsageError(f"{output}: cannot be read: {error.strerror or error}") from error


def _locked(output: Path) -> BaseFileLock:
    """Return a lock that no other run of this user holds. Raises UsageError if another run is writing to the output.

    The lock file is in the cache folder, because a file beside the output could clash with one of the user's files.
    """
    import filelock

    name = hashlib.sha256(os.fsencode(os.path.realpath(output))).hexdigest()[:32]
    folder = cache_folder("locks")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # One thread acquires the lock, and another thread may release it.
        lock = filelock.FileLock(folder / f"batch-{name}.lock", thread_local=False)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            hint = f"wait for that run to end; if no such run exists, remove {lock.lock_file}"
            raise UsageError(f"{output}: another run is writing to this file", hint=hint) from None
    return lock


def _put(file: FileIO, end: int, number: int, record: bytes) -> Place:
    """Append a line to a journal."""
    head = b"%d %08x " % (number, _crc(number, record))
    _append(file, end, head + record + b"\n")
    return Place(end + len(head), len(record))


def _append(file: FileIO, end: int, data: bytes) -> int:
    """Append to a file, and return the file's new end. After an error, the file is unchanged."""
    written = 0
    try:
        file.seek(end)
        while written < len(data):
            written += file.write(data[written:]) or 0
    except OSError:
        file.truncate(end)
        raise
    return end + written


def _opened(path: Path, mode: int = os.O_RDWR) -> FileIO:
    """Open a journal, which must be a file and not a link. Raises OSError and UsageError."""
    flags = mode | O_BINARY | O_NOFOLLOW | O_NONBLOCK
    file = FileIO(os.open(path, flags), "rb" if mode == os.O_RDONLY else "r+b")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise UsageError(f"{path}: not a file")
    return file


def _parsed_header(line: bytes) -> Mapping[str, Any] | None:
    try:
        header = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    is_ours = isinstance(header, dict) and header.pop("format", None) == _FORMAT
    return header if is_ours else None


def _parsed(line: bytes) -> tuple[int, int] | None:
    """Return the number of a journal line and the size of the part before its record, or None for a damaged line."""
    number, _, rest = line.partition(b" ")
    crc, _, record = rest.partition(b" ")
    if not number.isdigit() or len(number) > _MOST_DIGITS or len(crc) != 8:
        return None
    if b"%08x" % _crc(int(number), record[:-1]) != crc:
        return None
    return int(number), len(line) - len(record)


def _crc(number: int, record: bytes) -> int:
    return zlib.crc32(record, zlib.crc32(b"%d " % number))
