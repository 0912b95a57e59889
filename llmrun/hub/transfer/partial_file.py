"""Partially downloaded files, each with a journal of the byte ranges that have arrived.

The journal's first line identifies the file. Each following line describes one contiguous run of bytes: its start, the
end of the written bytes and the end of the bytes synced to disk. The numbers have a fixed width and are updated in
place after the bytes have been written or synced. If the process is killed, at most the bytes of its last write have to
be downloaded again. After a power failure, only the synced bytes are trusted.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from llmrun.base.errors import LlmrunError
from llmrun.base.folders import O_BINARY, O_NOFOLLOW
from llmrun.base.machine.processor import boot_id
from llmrun.hub.local.safe_writes import try_lock, writing

JOURNAL = ".journal"  # suffix that is appended to the partial file's name
_VERSION = 1
_DIGITS = 20
_LINE = 3 * (_DIGITS + 1)
_MOST_BYTES = 1 << 20  # the maximum size of a journal, enough for about 16,000 runs


@dataclass
class ByteRun:
    """A contiguous run of bytes that one connection writes. The range [start, written) has arrived."""

    index: int  # the index of the run's line in the journal
    start: int
    written: int
    synced: int
    file: io.FileIO | None = None  # None unless a connection is writing to the run


class PartialFile:
    """A partially downloaded file of `size` bytes. Several threads may write at the same time, each to its own run.

    The caller must hold the file's lock. While the file is open, `rm` and `prune` do not remove it (safe_writes.py).
    `validator` is the server's identifier of this version of the file (an ETag or a date), or "" if unknown.
    """

    def __init__(self, path: Path, size: int, sha256: str | None) -> None:
        """Open the partial file at `path`, or start over if its journal is invalid or describes a different file.

        Raises LlmrunError if the folder is not writable, and DoesNotFit if the disk is full.
        """
        self.path, self.size, self._sha256 = path, size, sha256
        self.journal = journal_of(path)
        self.validator = ""
        self._lock = threading.Lock()
        self._runs: list[ByteRun] = []
        self._first_line = 0  # the offset in the journal where the first run's line begins
        with writing(path):
            self._file = self._take()

    # --- received bytes -----------------------------------------------------------------------------------------------

    @property
    def received(self) -> int:
        """The number of received bytes."""
        with self._lock:
            return sum(run.written - run.start for run in self._runs)

    @property
    def frontier(self) -> int:
        """The number of received bytes before the first gap."""
        gaps = self.gaps()
        return gaps[0][0] if gaps else self.size

    def gaps(self) -> list[tuple[int, int]]:
        """Return the missing ranges as (start, end), in order."""
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

    def read(self, start: int, count: int) -> bytes:
        """Read bytes before the first gap. Only one thread may call `read`. Raises LlmrunError if reading fails."""
        with writing(self.path):
            self._file.seek(start)
            return self._file.read(count)

    # --- writing ------------------------------------------------------------------------------------------------------

    def begin(self, start: int) -> ByteRun:
        """Open a run for the bytes from `start` on: an idle run that ends at `start`, or else a new run."""
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
        """Append bytes to a run. If the disk is full, raises DoesNotFit and keeps the bytes already written."""
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
        """Close a run, which another connection may then continue."""
        with self._lock:
            if run.file is not None:
                run.file.close()
                run.file = None

    def name_version(self, validator: str) -> None:
        """Store the server's identifier of this version of the file."""
        with self._lock, writing(self.path):
            if validator != self.validator:
                self.validator = validator
                self._renew_journal()

    def sync(self) -> None:
        """Sync all written bytes to disk and record them in the journal, so that they survive a power failure."""
        with self._lock:
            reached = [(run, run.written) for run in self._runs]
        with writing(self.path):
            os.fsync(self._file.fileno())
            with self._lock:
                for run, written in reached:
                    run.synced = written
                    self._put(self._line_at(run.index) + 2 * (_DIGITS + 1), b"%020d" % written)
            os.fsync(self._journal.fileno())

    # --- closing ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the file and its journal. The received bytes are kept, and a later run can resume the download."""
        for run in self._runs:
            self.end(run)
        self._held.close()

    def clear(self) -> None:
        """Discard all received bytes."""
        with self._lock, writing(self.path):
            self._runs.clear()
            self.validator = ""
            self._renew_journal()
            self._file.truncate(0)

    # --- the journal --------------------------------------------------------------------------------------------------

    def _take(self) -> io.FileIO:
        """Open the file and lock it against removal, and start over if another process has removed the file meanwhile.

        The journal is created first because `prune` removes partial files without a journal.
        """
        while True:
            self._runs, self.validator = [], ""
            if not self._resume():
                remove(self.path)
            self._journal = self._new_journal()
            with contextlib.ExitStack() as held:
                held.callback(lambda: self._journal.close())  # closes the newest journal, because journals are replaced
                file = held.enter_context(_opened(self.path, os.O_CREAT))
                if not try_lock(held, self.path, shared=True):
                    again = "run the command again to restart the download"
                    raise LlmrunError(f"disk: {self.path}: another process is removing this file", hint=again)
                here = os.fstat(file.fileno()).st_size
                if here >= max((run.written for run in self._runs), default=0) and _is_at(file, self.path):
                    self._held = held.pop_all()
                    return file

    def _resume(self) -> bool:
        """Load the runs from the journal. Returns False if nothing can be resumed."""
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
            return False  # without a sha256 or a validator, a changed file on the server would go unnoticed
        boot, reached = boot_id(), 0  # without a boot, unsynced bytes are trusted only if the sha256 will be verified
        lasted = told.get("boot") == boot and (boot != "" or self._sha256 is not None)
        for start, written, synced in sorted(lines):
            end = min(written if lasted else synced, here, self.size)
            start = max(start, reached)
            if start < end:
                self._runs.append(ByteRun(len(self._runs), start, end, min(max(start, synced), end)))
                reached = end
        return True

    def _new_journal(self) -> io.FileIO:
        """Replace the journal atomically and open the new journal. A killed process leaves the old journal."""
        told = {"version": _VERSION, "size": self.size, "sha256": self._sha256}
        head = json.dumps(told | {"validator": self.validator, "boot": boot_id()}).encode() + b"\n"
        self._first_line = len(head)
        new = _successor_of(self.journal)
        new.unlink(missing_ok=True)
        new.write_bytes(head + b"".join(_line(run) for run in self._runs))
        new.replace(self.journal)
        return _opened(self.journal)

    def _renew_journal(self) -> None:
        self._journal.close()  # Windows cannot replace an open file
        self._journal = self._new_journal()

    def _line_at(self, index: int) -> int:
        return self._first_line + index * _LINE

    def _put(self, position: int, data: bytes) -> None:
        self._journal.seek(position)
        self._journal.write(data)


def journal_of(path: Path) -> Path:
    """Return the path of a partial file's journal."""
    return path.with_name(path.name + JOURNAL)


def remove(path: Path) -> None:
    """Remove the partial file at `path` and its journal, if they exist. Raises OSError."""
    for leftover in (path, journal_of(path), _successor_of(journal_of(path))):
        leftover.unlink(missing_ok=True)


def _successor_of(journal: Path) -> Path:
    return journal.with_name(journal.name + ".new")


def _opened(path: Path, more: int = 0) -> io.FileIO:
    """Open a file for reading and writing, without truncating it and without following a symlink."""
    return io.FileIO(os.open(path, os.O_RDWR | O_BINARY | O_NOFOLLOW | more, 0o666), "r+")


def _is_at(file: io.FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False


def _line(run: ByteRun) -> bytes:
    return b"%020d %020d %020d\n" % (run.start, run.written, run.synced)


def understood(data: bytes) -> tuple[dict[str, object], list[tuple[int, int, int]]]:
    """Parse a journal, and return its header and (start, written, synced) for each run.

    An incomplete last line is ignored. Raises ValueError if the data is not a journal.
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
