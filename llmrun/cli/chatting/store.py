"""Where conversations are kept: one journal each, appended to as they go, and the copies that /save made.

    conversations/20261120-143012-1f3a9c2e.jsonl  saved as it goes; its name is when it began
    conversations/saved/NAME.jsonl                a copy, written as a whole
    conversations/.locks/                         who writes to which journal

Folders are made with mode 0700, files with 0600.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmrun.cli.chatting.conversation import Conversation, Misplaced
from llmrun.cli.chatting.events import Began, from_line, to_line
from llmrun.cli.chatting.journal import ConversationFileError, Journal, lock_journal
from llmrun.errors import UsageError

ENDING = ".jsonl"
LARGEST_FILE = 64 << 20  # bytes: a million tokens of answers
LONGEST_NAME = 64  # characters


@dataclass(frozen=True, slots=True)
class Recording:
    """A conversation as it was found in a file.

    whole_bytes  of the file are whole lines; what follows was torn off by a crash and counts for nothing
    """

    path: Path
    conversation: Conversation
    whole_bytes: int
    changed: float  # seconds since the epoch


class Store:
    """The conversations in one folder, which need not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def latest(self) -> Path | None:
        """The journal that was written to last."""
        return next(iter(self.journals()), None)

    def journals(self) -> list[Path]:
        """All of them, the one written to last first. Raises OSError when the folder cannot be read."""
        return _by_change(self.folder)

    def named(self) -> list[Path]:
        """The copies that /save made, the last one first."""
        return _by_change(self.folder / "saved")

    def find(self, name: str) -> Path:
        """A saved copy, or a journal, by name. Raises UsageError."""
        name = checked_name(name)
        for path in (self._saved(name), self.folder / f"{name}{ENDING}"):
            if path.is_file():
                return path
        near = _nearest(name, [path.stem for path in self.named()])
        raise UsageError(
            f"/load: {name}: no such conversation", hint=f"did you mean {near}?" if near else "/load lists them"
        )

    def is_saved_copy(self, path: Path) -> bool:
        return path.parent == self.folder / "saved"

    def begin(self, conversation: Conversation) -> Journal:
        """Open a journal of its own for a conversation, with everything in it that has happened. Raises OSError."""
        _make_folder(self.folder)
        path = self.folder / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(4)}{ENDING}"
        lock = lock_journal(path)
        try:
            _write_whole(path, conversation)
            return Journal(path, path.stat().st_size, lock)
        except BaseException:
            lock.release()
            raise

    def save(self, name: str, conversation: Conversation) -> Path:
        """Keep a copy by name, in place of an older copy of the same conversation. Raises UsageError and OSError."""
        name = checked_name(name)
        path = self._saved(name)
        if path.exists() and read_conversation(path).conversation.began.conversation != conversation.began.conversation:
            raise UsageError(
                f"/save: {name}: there is another conversation by this name",
                hint="take another name, or remove " + str(path),
            )
        _make_folder(self.folder)
        _make_folder(path.parent)
        _write_whole(path, conversation)
        return path

    def _saved(self, name: str) -> Path:
        return self.folder / "saved" / f"{name}{ENDING}"


@contextlib.contextmanager
def in_our_words(command: str) -> Iterator[None]:
    """Trouble with a file becomes a ConversationFileError that names the command."""
    try:
        yield
    except OSError as error:
        raise ConversationFileError(f"{command}: {error.filename or 'file'}: {error.strerror or error}") from error


def read_conversation(path: Path) -> Recording:
    """A conversation's file. A last line that was torn off counts for nothing; anything else that breaks a rule
    raises ConversationFileError, which names the line. Raises OSError."""
    if not path.is_file():  # a pipe or a device would never come to its end
        raise ConversationFileError(f"conversation: {path}: not a file")
    with path.open("rb") as file:
        data = file.read(LARGEST_FILE + 1)
        changed = os.fstat(file.fileno()).st_mtime
    if len(data) > LARGEST_FILE:
        raise ConversationFileError(f"conversation: {path}: more than {LARGEST_FILE >> 20} MiB")
    whole = data.rfind(b"\n") + 1
    conversation: Conversation | None = None
    for number, line in _lines(data, whole):
        try:
            event = from_line(line)
            if conversation is not None:
                conversation.apply(event)
            elif isinstance(event, Began):
                conversation = Conversation(event, event.model)
            else:
                raise Misplaced("it does not begin with its beginning")
        except ValueError as error:
            raise ConversationFileError(
                f"conversation is damaged: {path}: line {number}: {error}", hint="llmrun chat begins a new one"
            ) from None
    if conversation is None:
        raise ConversationFileError(
            f"conversation is damaged: {path}: no whole line in it", hint="llmrun chat begins a new one"
        )
    return Recording(path, conversation, whole, changed)


def _lines(data: bytes, whole: int) -> Iterator[tuple[int, bytes]]:
    start = 0
    number = 0
    while start < whole:
        end = data.index(b"\n", start)
        number += 1
        yield number, data[start:end]
        start = end + 1


def checked_name(name: str) -> str:
    """A name that is a file's name and nothing more, in Unicode's composed form. Raises UsageError."""
    name = unicodedata.normalize("NFC", name.strip())
    allowed = all(character.isalnum() or character in " ._-" for character in name)
    if not allowed or not name or name[0] in ".-" or name[-1] == "." or len(name) > LONGEST_NAME:
        raise UsageError(
            f"{name!r:.80} is no name for a conversation",
            hint=f"letters, digits, blanks and . _ - in the middle, up to {LONGEST_NAME} characters",
        )
    if len(os.fsencode(name)) > 200:  # file systems count bytes, up to 255
        raise UsageError(f"{name!r:.80} is too long for a file's name", hint="take a shorter one")
    return name


def _nearest(name: str, names: list[str]) -> str | None:
    import difflib

    return next(iter(difflib.get_close_matches(name, names, n=1)), None)


def _by_change(folder: Path) -> list[Path]:
    try:
        found = [entry for entry in os.scandir(folder) if re.fullmatch(r"[^.].*\.jsonl", entry.name)]
    except FileNotFoundError:
        return []
    dated = []
    for entry in found:
        with contextlib.suppress(OSError):  # gone since it was listed
            if entry.is_file():
                dated.append((entry.stat().st_mtime_ns, entry.name))
    return [folder / name for _, name in sorted(dated, reverse=True)]


def _make_folder(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def _write_whole(path: Path, conversation: Conversation) -> None:
    """Write a file at once: under its name there is the old one, or all of the new one."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123  a descriptor, for its mode
            file.writelines(map(to_line, conversation.history()))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
