"""A file on its way: its bytes at their places, and beside it a journal of those that have arrived.

The journal is a line that says which file this is to become, then a line for each run of bytes: where it starts, how
far it is written, and how far it had reached the disk. Numbers are of fixed width and are written over in place, after
the bytes they speak of: a process may die at any moment and no byte is fetched twice. After a power cut only what had
reached the disk counts.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from llmrun.errors import LlmrunError
from llmrun.hub.local.safe_writes import require_space, writing

JOURNAL = ".journal"  # suffix, after the partial file's own
_VERSION = 1
_DIGITS = 20
_LINE = 3 * (_DIGITS + 1)
_MOST_BYTES = 1 << 20  # of a journal: fifteen thousand runs
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


@dataclass
class ByteRun:
    """Bytes that one connection writes, one after the other: [start, written) are there."""

    index: int  # its line in the journal
    start: int
    written: int
    synced: int
    file: io.FileIO | None = None  # while a connection writes it


class PartialFile:
    """The bytes that are here of a file of `size` bytes. Several threads may write, each its own run.

    The caller holds the file's lock; while it is open, no `rm` or `prune` removes it (open_models.py). `validator` is
    what the server calls this version of the file (an ETag or a date), or "" until it is known.
    """

    def __init__(self, path: Path, size: int, sha256: str | None) -> None:
        """Go on with what is at `path`, if it is of this file and can be trusted; else begin anew.

        Raises LlmrunError for a folder that cannot be written, DoesNotFit for a full one.
        """
        self.path, self.size, self._sha256 = path, size, sha256
        self.journal = journal_of(path)
        self.validator = ""
        self._lock = threading.Lock()
        self._runs: list[ByteRun] = []
        self._first_line = 0  # where it begins in the journal
        with writing(path):
            self._file = self._take()

    # --- what is here -------------------------------------------------------------------------------------------------

    @property
    def received(self) -> int:
        """Bytes that are here."""
        with self._lock:
            return sum(run.written - run.start for run in self._runs)

    @property
    def frontier(self) -> int:
        """Bytes that are here from the beginning on, without a gap."""
        gaps = self.gaps()
        return gaps[0][0] if gaps else self.size

    def gaps(self) -> list[tuple[int, int]]:
        """(start, end) of what is missing, in order."""
        with self._lock:
            present = sorted((run.start, run.written) for run in self._runs)
        found, end = [], 0
        for start, written in present:
            if start > end:
                found.append((end, start))
            end = max(end, written)
        if end < self.size:
            found.append((end, self.size))
        return found

    def require_space(self, what: str) -> None:
        """Raise DoesNotFit unless there is room for what is missing."""
        require_space(self.path.parent, self.size - self.received, what)

    def read(self, start: int, count: int) -> bytes:
        """Bytes below the frontier; for one thread. Raises LlmrunError for a disk that cannot read them."""
        with writing(self.path):
            self._file.seek(start)
            return self._file.read(count)

    # --- more of it ---------------------------------------------------------------------------------------------------

    def begin(self, start: int) -> ByteRun:
        """A run for bytes from `start` on: the one that ends there, if nobody writes it, or a new one."""
        with self._lock, writing(self.path):
            run = next((run for run in self._runs if run.file is None and run.written == start), None)
            if run is None:
                run = ByteRun(len(self._runs), start, start, start)
                self._put(self._line_at(run.index), _line(run))
                self._runs.append(run)
            run.file = _opened(self.path)
            run.file.seek(start)
            return run

    def write(self, run: ByteRun, data: bytes) -> None:
        """Add to a run. Raises DoesNotFit when the disk is full; what was written until then counts."""
        assert run.file is not None
        view = memoryview(data)
        with writing(self.path):
            while view:
                count = run.file.write(view)
                view = view[count:]
                with self._lock:
                    run.written += count
                    self._put(self._line_at(run.index) + _DIGITS + 1, b"%020d" % run.written)

    def end(self, run: ByteRun) -> None:
        """Nobody writes this run any more."""
        with self._lock:
            if run.file is not None:
                run.file.close()
                run.file = None

    def name_version(self, validator: str) -> None:
        """Remember what the server calls this version of the file."""
        with self._lock, writing(self.path):
            if validator != self.validator:
                self.validator = validator
                self._renew_journal()

    def sync(self) -> None:
        """What is written reaches the disk, and the journal says so. A power cut after this costs nothing."""
        with self._lock:
            reached = [(run, run.written) for run in self._runs]
        with writing(self.path):
            os.fsync(self._file.fileno())
            with self._lock:
                for run, written in reached:
                    run.synced = written
                    self._put(self._line_at(run.index) + 2 * (_DIGITS + 1), b"%020d" % written)
            os.fsync(self._journal.fileno())

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Keep what is here for the next time."""
        for run in self._runs:
            self.end(run)
        self._file.close()
        self._journal.close()

    def clear(self) -> None:
        """Begin anew: nothing that is here counts."""
        with self._lock, writing(self.path):
            self._runs.clear()
            self.validator = ""
            self._renew_journal()
            self._file.truncate(0)

    # --- the journal --------------------------------------------------------------------------------------------------

    def _take(self) -> io.FileIO:
        """The file, opened and held. Another process may have removed it while we read the journal: then anew.

        The journal is there first: whoever finds the file without one takes it for a leftover.
        """
        while True:
            self._runs, self.validator = [], ""
            if not self._resume():
                remove(self.path)
            self._journal = self._new_journal()
            file = _opened(self.path, os.O_CREAT)
            try:
                _hold(file, self.path)
                here = os.fstat(file.fileno()).st_size
                if here >= max((run.written for run in self._runs), default=0) and _is_at(file, self.path):
                    return file
            except BaseException:
                file.close()
                self._journal.close()
                raise
            file.close()
            self._journal.close()

    def _resume(self) -> bool:
        """Take over the runs of the journal. False: there is nothing that can be."""
        try:
            if self.path.is_symlink() or self.journal.is_symlink():
                return False
            here = self.path.stat().st_size
            with self.journal.open("rb") as file:
                told, lines = understood(file.read(_MOST_BYTES + 1))
        except (OSError, ValueError, RecursionError):
            return False
        if (told.get("version"), told.get("size"), told.get("sha256")) != (_VERSION, self.size, self._sha256):
            return False
        self.validator = str(told.get("validator", ""))
        if not self.validator and self._sha256 is None:
            return False  # nothing would tell whether what follows is of the same file
        boot, reached = this_boot(), 0
        lasted = told.get("boot") == boot and (boot != "" or self._sha256 is not None)
        for start, written, synced in sorted(lines):
            end = min(written if lasted else synced, here, self.size)
            start = max(start, reached)
            if start < end:
                self._runs.append(ByteRun(len(self._runs), start, end, min(max(start, synced), end)))
                reached = end
        return True

    def _new_journal(self) -> io.FileIO:
        """All of it, in one step: who dies here has the old one."""
        told = {"version": _VERSION, "size": self.size, "sha256": self._sha256}
        head = json.dumps(told | {"validator": self.validator, "boot": this_boot()}).encode() + b"\n"
        self._first_line = len(head)
        new = _successor_of(self.journal)
        new.unlink(missing_ok=True)
        new.write_bytes(head + b"".join(_line(run) for run in self._runs))
        new.replace(self.journal)
        return _opened(self.journal)

    def _renew_journal(self) -> None:
        self._journal.close()  # first: Windows renames nothing to the name of an open file
        self._journal = self._new_journal()

    def _line_at(self, index: int) -> int:
        return self._first_line + index * _LINE

    def _put(self, position: int, data: bytes) -> None:
        self._journal.seek(position)
        self._journal.write(data)


def journal_of(path: Path) -> Path:
    return path.with_name(path.name + JOURNAL)


def remove(path: Path) -> None:
    """The partial file at `path` and its journal, if there are any. Raises OSError."""
    for leftover in (path, journal_of(path), _successor_of(journal_of(path))):
        leftover.unlink(missing_ok=True)


def is_begun(path: Path) -> bool:
    """Whether `remove` would find anything."""
    return any(os.path.lexists(left) for left in (path, journal_of(path), _successor_of(journal_of(path))))


def _successor_of(journal: Path) -> Path:
    return journal.with_name(journal.name + ".new")


def _opened(path: Path, more: int = 0) -> io.FileIO:
    """To read and write, at any place; never through a link."""
    return io.FileIO(os.open(path, os.O_RDWR | _NO_LINK | more, 0o666), "r+")


def _hold(file: io.FileIO, path: Path) -> None:
    """Have `rm` and `prune` find the file in use until it is closed (open_models.py). Windows removes no open file."""
    if os.name != "posix":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise LlmrunError(
            f"disk: {path}: another process is removing it", hint="run the command again: it begins anew"
        ) from error
    except OSError:
        return  # a file system that knows no locks


def _is_at(file: io.FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False


def this_boot() -> str:
    """Which start of the machine this is; "" where the system does not tell: there every start is taken for the same
    where a sha256 finds out bytes that a power cut took."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return ""


def _line(run: ByteRun) -> bytes:
    return b"%020d %020d %020d\n" % (run.start, run.written, run.synced)


def understood(data: bytes) -> tuple[dict[str, object], list[tuple[int, int, int]]]:
    """What a journal says; a last line that was not finished is nothing.

    Raises ValueError for what is not a journal.
    """
    head, _, rest = data.partition(b"\n")
    told = json.loads(head)
    if len(data) > _MOST_BYTES or not isinstance(told, dict):
        raise ValueError("not a journal")
    lines = []
    for position in range(0, len(rest) - _LINE + 1, _LINE):
        start, written, synced = (int(number) for number in rest[position : position + _LINE].split())
        lines.append((start, written, synced))
    return told, lines
