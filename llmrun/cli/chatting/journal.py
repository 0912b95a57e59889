"""Appends events to a conversation's file, which is locked against other writers.

    NAME.jsonl      one line per event
    NAME.answering  the streaming answer. The first line is the size of NAME.jsonl when the answer began, and each
                    further line is a piece of the answer

NAME.answering exists while an answer streams. It is removed after the whole answer has been saved in NAME.jsonl. If the
process dies between these two steps, NAME.jsonl is larger than the recorded size, so readers ignore NAME.answering.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.base.errors import LlmrunError
from llmrun.base.open_flags import O_BINARY
from llmrun.cli.chatting.events import Answered, Event, Piece, to_line
from llmrun.engine.saved_state.budget import ENDING

if TYPE_CHECKING:
    from filelock import BaseFileLock


class ConversationFileError(LlmrunError):
    """A conversation's file is damaged, or cannot be read or written."""


class InUse(ConversationFileError):
    """Another process is writing to this journal."""


class Lock:
    """A lock on a journal. If the process dies, the operating system releases the lock."""

    def __init__(self, held: BaseFileLock, path: Path) -> None:
        self._held = held
        self._path = path

    def release(self) -> None:
        """Remove the lock file before releasing the lock. Idempotent."""
        if self._held.is_locked:
            with contextlib.suppress(OSError):  # an empty lock file that is left behind is harmless
                self._path.unlink()
            self._held.release()


def lock_journal(path: Path) -> Lock:
    """Lock a journal for writing. Raises InUse, and OSError if the folder is not writable."""
    import filelock

    folder = path.parent / ".locks"
    folder.mkdir(mode=0o700, exist_ok=True)
    lock_path = folder / f"{path.stem}.lock"
    lock = filelock.FileLock(lock_path, mode=0o600)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise InUse(f"conversation: {path}: another process is writing to it") from None
    return Lock(lock, lock_path)


def answering_path(path: Path) -> Path:
    """Return the path of the file with the streaming answer, given the path of the conversation's file."""
    return path.with_suffix(".answering")


def state_path(path: Path) -> Path:
    """Return the path of the file with the saved KV cache, given the path of the conversation's file."""
    return path.with_suffix(ENDING)


class Journal:
    """Appends events to a locked file. Everything that was written survives a crash of the process."""

    def __init__(self, path: Path, whole_bytes: int, lock: Lock, answering_bytes: int | None = None) -> None:
        """Open a conversation's file and remove its last line if it is incomplete. Raises OSError.

        whole_bytes      size of the file's complete lines
        answering_bytes  the same for the streaming answer's file, or None if there is no such file or it is out of date
        """
        self.path = path
        self._lock = lock
        self._answer: _Appended | None = None
        self._messages = _Appended(path, whole_bytes)
        if answering_bytes is not None:
            try:
                self._answer = _Appended(answering_path(path), answering_bytes)
            except BaseException:
                self._messages.close()
                raise

    @property
    def is_answering(self) -> bool:
        """True if pieces of an answer have been saved, but the complete answer has not."""
        return self._answer is not None

    def write_piece(self, piece: Piece) -> None:
        """Append a piece of the streaming answer to the answer's file.

        Raises OSError, after which the file ends with the previous piece or with a partial line that readers ignore.
        """
        if self._answer is None:
            path = answering_path(self.path)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | O_BINARY
            os.close(os.open(path, flags, 0o600))
            self._answer = _Appended(path, 0)
            self._answer.append(json.dumps({"after": self._messages.size}).encode() + b"\n" + to_line(piece))
        else:
            self._answer.append(to_line(piece))

    def write(self, event: Event) -> None:
        """Append an event to the conversation's file. If it is a complete answer, sync the file and remove the pieces.

        Raises OSError like `write_piece`, in which case the pieces are kept.
        """
        self._messages.append(to_line(event))
        if isinstance(event, Answered):
            self._messages.sync()
            self._drop_answer()

    def close(self) -> None:
        """Close the files and release the lock. Idempotent."""
        self._close_files()
        self._lock.release()

    def move(self, path: Path, lock: Lock) -> None:
        """Rename the file to a path that is locked and unused, while no answer streams. Raises OSError."""
        with contextlib.suppress(OSError):  # an out-of-date file that an earlier process could not remove
            answering_path(self.path).unlink()
        with contextlib.suppress(OSError):  # there is none, or it is computed again
            state_path(self.path).rename(state_path(path))
        self._messages.move(path)
        self._lock.release()
        self.path, self._lock = path, lock

    def discard(self) -> None:
        """Remove the files and close the journal. Raises OSError."""
        self._close_files()
        try:
            remove_files(self.path)
        finally:
            self.close()

    def _close_files(self) -> None:
        self._messages.close()
        if self._answer is not None:
            self._answer.close()
            self._answer = None

    def _drop_answer(self) -> None:
        if self._answer is not None:
            self._answer.close()
            self._answer = None
            with contextlib.suppress(OSError):  # readers recognize that the file is out of date
                answering_path(self.path).unlink()


class OlderFile:
    """A locked file in an older format. The file is not changed until the conversation continues."""

    def __init__(self, path: Path, lock: Lock) -> None:
        self.path = path
        self.lock = lock

    def close(self) -> None:
        """Release the lock. Idempotent."""
        self.lock.release()


def remove_files(path: Path) -> None:
    """Remove a conversation's file, its streaming answer and its saved KV cache. Raises OSError."""
    state_path(path).unlink(missing_ok=True)
    answering_path(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


class _Appended:
    """An open file to which only complete lines are appended."""

    def __init__(self, path: Path, whole_bytes: int) -> None:
        self.size = whole_bytes
        self._path = path
        self._open()
        try:
            # Truncate only if necessary, because truncating always changes the file's mtime.
            if os.fstat(self._descriptor).st_size != whole_bytes:
                os.ftruncate(self._descriptor, whole_bytes)
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | O_BINARY)

    def move(self, path: Path) -> None:
        """Rename the file, which Windows permits only while it is closed. Raises OSError."""
        if sys.platform == "win32":
            self.close()
        try:
            self._path = self._path.rename(path)
        finally:
            if self._descriptor < 0:
                self._open()

    def append(self, lines: bytes) -> None:
        try:
            written = os.write(self._descriptor, lines)
            while written < len(lines):
                written += os.write(self._descriptor, lines[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self.size)
            raise
        self.size += len(lines)

    def sync(self) -> None:
        with contextlib.suppress(OSError):  # some file systems do not support fsync
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
