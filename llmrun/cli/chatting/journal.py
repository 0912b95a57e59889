"""One conversation's file while it is being written: events are appended, and nobody else appends."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.cli.chatting.events import AnswerEnded, Event, to_line
from llmrun.errors import LlmrunError

if TYPE_CHECKING:
    from filelock import BaseFileLock


class ConversationFileError(LlmrunError):
    """The file of a conversation cannot be used: it is damaged, or it cannot be read or written."""


class InUse(ConversationFileError):
    """Another process writes to this journal."""


class Lock:
    """The right to write to a journal. The operating system takes it back when the process dies."""

    def __init__(self, held: BaseFileLock, path: Path) -> None:
        self._held = held
        self._path = path

    def release(self) -> None:
        """Idempotent. The file goes first, while it is still ours."""
        if self._held.is_locked:
            with contextlib.suppress(OSError):  # an empty file that stays hurts nobody
                self._path.unlink()
            self._held.release()


def lock_journal(path: Path) -> Lock:
    """Become the only one who writes to a journal. Raises InUse, and OSError where nothing can be written."""
    import filelock

    folder = path.parent / ".locks"
    folder.mkdir(mode=0o700, exist_ok=True)
    lock_path = folder / f"{path.stem}.lock"
    lock = filelock.FileLock(lock_path, mode=0o600)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise InUse(f"conversation: {path}: another process writes to it") from None
    return Lock(lock, lock_path)


class Journal:
    """Appends to a file that is locked. What `write` has returned from survives the death of the process."""

    def __init__(self, path: Path, whole_bytes: int, lock: Lock) -> None:
        """`whole_bytes` of the file are whole lines; a torn one after them is cut off. Raises OSError."""
        self.path = path
        self._lock = lock
        self._end = whole_bytes
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_CLOEXEC", 0))
        try:
            os.ftruncate(self._descriptor, whole_bytes)
        except BaseException:
            self.close()
            raise

    def write(self, event: Event) -> None:
        """Append one event; at the end of an answer, see it onto the disk. Raises OSError, and then no part of the
        event stays in the file (or one that is torn, and counts for nothing)."""
        line = to_line(event)
        try:
            written = os.write(self._descriptor, line)
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            raise
        self._end += len(line)
        if isinstance(event, AnswerEnded):
            with contextlib.suppress(OSError):  # a disk without fsync keeps what it keeps
                os.fsync(self._descriptor)

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._lock.release()
