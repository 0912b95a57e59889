"""Where conversations are kept: a file each, appended to as they go, and the copies that /save made.

    conversations/why-is-the-sky-blue.jsonl      saved as it goes, and named after its first question
    conversations/why-is-the-sky-blue.answering  the answer under way (see journal.py)
    conversations/saved/NAME.jsonl               a copy, written as a whole
    conversations/.locks/                        who writes to which journal

Folders are made with mode 0700, files with 0600. Files of earlier versions are named 20261120-143012-1f3a9c2e.jsonl.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import stat
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmrun.cli.chatting.conversation import Conversation, Misplaced
from llmrun.cli.chatting.events import Began, Piece, from_line, to_line
from llmrun.cli.chatting.journal import (
    ConversationFileError,
    InUse,
    Journal,
    Lock,
    OlderFile,
    answering_path,
    lock_journal,
    remove_files,
)
from llmrun.errors import UsageError

ENDING = ".jsonl"
LARGEST_FILE = 64 << 20  # bytes: a million tokens of answers
LONGEST_NAME = 64  # characters
LONGEST_OWN_NAME = 40  # characters of a name made of a question's first words
MOST_WORDS = 6
MOST_MEANT = 3  # names that a hint may hold
_DAMAGE_HINT = "llmrun chat begins a new one"
_HEAD = re.compile(rb'\{"after": (\d{1,18})\}')
_APOSTROPHES = {ord(character): None for character in "'\u2019"}


@dataclass(frozen=True, slots=True)
class Recording:
    """A conversation as it was found in a file.

    whole_bytes      of the file are whole lines; what follows was torn off by a crash and counts for nothing
    answering_bytes  the same of the answer under way; None where there is none
    changed          seconds since the epoch
    """

    path: Path
    conversation: Conversation
    whole_bytes: int
    answering_bytes: int | None
    changed: float

    @property
    def name(self) -> str:
        return self.path.stem


class Store:
    """The conversations in one folder, which need not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def latest(self) -> Path | None:
        """Return the journal that was written to last among those in which something is said.

        A damaged one counts too: whoever opens it reports the damage.
        """
        return next((path for path in self.journals() if not _is_empty(path)), None)

    def journals(self) -> list[Path]:
        """All of them, the one written to last first. Raises OSError when the folder cannot be read."""
        return _by_change(self.folder)

    def named(self) -> list[Path]:
        """The copies that /save made, the last one first."""
        return _by_change(self.folder / "saved")

    def find(self, typed: str, command: str) -> Path:
        """Find a saved copy or a journal by its name, or by the beginning of its name if no other name begins so.

        Raises UsageError, which begins with the command.
        """
        name = checked_name(typed)
        if path := self.exactly(name):
            return path
        known = {path.stem: path for path in [*self.journals(), *self.named()]}
        begun = [known_name for known_name in known if known_name.casefold().startswith(name.casefold())]
        if len(begun) == 1:
            return known[begun[0]]
        if begun:
            raise UsageError(f"{command}: {name}: {len(begun)} conversations begin with this name", hint=_listed(begun))
        near = _nearest(name, list(known))
        lists = "/load" if command.startswith("/") else "llmrun conversations"
        raise UsageError(
            f"{command}: {name}: no such conversation",
            hint=f"did you mean {_listed(near)}?" if near else f"{lists} lists them",
        )

    def exactly(self, name: str) -> Path | None:
        """Return the saved copy or the journal that has exactly this name, which may be any text."""
        paths = [*self.named(), *self.journals()]
        return next((path for path in paths if path.stem == unicodedata.normalize("NFC", name.strip())), None)

    def is_saved_copy(self, path: Path) -> bool:
        return path.parent == self.folder / "saved"

    def begin(self, conversation: Conversation) -> Journal:
        """Open a journal of its own for a conversation, with everything in it that has happened. Raises OSError."""
        _make_folder(self.folder)
        path, lock = self._new_path(conversation)
        return self._written(path, conversation, lock)

    def convert(self, old: OlderFile, conversation: Conversation) -> Journal:
        """Write a file of an older format anew, in today's. Raises OSError, and then the old file is still there."""
        return self._written(old.path, conversation, old.lock)

    def _written(self, path: Path, conversation: Conversation, lock: Lock) -> Journal:
        try:
            _write_whole(path, conversation)
            return Journal(path, path.stat().st_size, lock)
        except BaseException:
            lock.release()
            raise

    def _new_path(self, conversation: Conversation) -> tuple[Path, Lock]:
        """Find a name that no conversation has, and lock it."""
        words = name_for(conversation.exchanges[0].question)
        for number in itertools.count(1):
            name = words if number == 1 else f"{words}-{number}"
            path = self.folder / f"{name}{ENDING}"
            if path.exists() or self._saved(name).exists():
                continue
            try:
                lock = lock_journal(path)
            except InUse:
                continue
            if not path.exists():
                return path, lock
            lock.release()  # another process has taken it meanwhile
        raise AssertionError("numbers do not end")

    def save(self, name: str, conversation: Conversation) -> Path:
        """Keep a copy by name, in place of an older copy of the same conversation. Raises UsageError and OSError."""
        name = checked_name(name)
        path = self._saved(name)
        if path.exists() and read_conversation(path).conversation.began.conversation != conversation.began.conversation:
            raise UsageError(
                f"/save: {name}: there is another conversation by this name",
                hint="take another name, or remove " + str(path),
            )
        if (self.folder / f"{name}{ENDING}").exists():
            raise UsageError(f"/save: {name}: a conversation already has this name", hint="take another name")
        _make_folder(self.folder)
        _make_folder(path.parent)
        _write_whole(path, conversation)
        return path

    def remove(self, path: Path) -> None:
        """Remove a conversation or a saved copy. Raises InUse while a chat writes to it, and OSError."""
        if self.is_saved_copy(path):
            path.unlink()
            return
        lock = lock_journal(path)
        try:
            remove_files(path)
        finally:
            lock.release()

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
    """Read a conversation's file, and its answer under way if there is one. A last line that was torn off counts for
    nothing. Raises ConversationFileError, which names the line, for anything else that breaks a rule, and OSError."""
    try:
        pieces = _read(answering_path(path))  # first: it is removed after the other file has grown
    except FileNotFoundError:
        pieces = None
    messages = _read(path)
    conversation: Conversation | None = None
    for number, line in messages.lines():
        with _damage_told(path, number):
            event = from_line(line)
            if conversation is not None:
                conversation.apply(event)
            elif isinstance(event, Began):
                conversation = Conversation(event, event.model)
            else:
                raise Misplaced("it does not begin with its beginning")
    if conversation is None:
        raise ConversationFileError(f"conversation is damaged: {path}: no whole line in it", hint=_DAMAGE_HINT)
    answering_bytes = None
    if pieces is not None and _continue_with(pieces, conversation, messages.whole, answering_path(path)):
        answering_bytes = pieces.whole
    changed = max(messages.changed, pieces.changed if pieces else 0)
    return Recording(path, conversation, messages.whole, answering_bytes, changed)


def _continue_with(pieces: _Content, conversation: Conversation, after: int, path: Path) -> bool:
    """Apply the answer under way. False: there is none yet, or it began after another line than the last."""
    began = False
    for number, line in pieces.lines():
        with _damage_told(path, number):
            if number > 1:
                event = from_line(line)
                if not isinstance(event, Piece):
                    raise Misplaced("this is no piece of an answer")
                conversation.apply(event)
                began = True
            elif not (head := _HEAD.fullmatch(line)):
                raise Misplaced("it does not begin with its place")
            elif int(head[1]) != after:
                break
    return began


@dataclass(frozen=True, slots=True)
class _Content:
    """What a file held when it was read; `whole` bytes of it are whole lines."""

    data: bytes
    whole: int
    changed: float

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield each whole line without its newline, and its number from 1 on."""
        start = 0
        number = 0
        while start < self.whole:
            end = self.data.index(b"\n", start)
            number += 1
            yield number, self.data[start:end]
            start = end + 1


def _read(path: Path) -> _Content:
    if not stat.S_ISREG(path.stat().st_mode):  # a pipe or a device would never come to its end
        raise ConversationFileError(f"conversation: {path}: not a file")
    with path.open("rb") as file:
        data = file.read(LARGEST_FILE + 1)
        changed = os.fstat(file.fileno()).st_mtime
    if len(data) > LARGEST_FILE:
        raise ConversationFileError(f"conversation: {path}: more than {LARGEST_FILE >> 20} MiB")
    return _Content(data, data.rfind(b"\n") + 1, changed)


@contextlib.contextmanager
def _damage_told(path: Path, number: int) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConversationFileError(
            f"conversation is damaged: {path}: line {number}: {error}", hint=_DAMAGE_HINT
        ) from None


def _is_empty(path: Path) -> bool:
    """Whether nothing is said in a conversation, as far as its file can be read."""
    try:
        return not read_conversation(path).conversation.exchanges
    except (ConversationFileError, OSError):
        return False


def name_for(question: str) -> str:
    """Make a short name of the first words of a question: `why-is-the-sky-blue`."""
    plain = unicodedata.normalize("NFC", question[:1000]).lower().translate(_APOSTROPHES)
    name = ""
    for word in re.findall(r"[^\W_]+", plain)[:MOST_WORDS]:
        longer = f"{name}-{word}" if name else word[:LONGEST_OWN_NAME]
        if len(longer) > LONGEST_OWN_NAME:
            break
        name = longer
    return unicodedata.normalize("NFC", name) or "chat"


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


def _nearest(name: str, names: list[str]) -> list[str]:
    """Return the names that hold what was typed, or else those that differ by a slip."""
    import difflib

    holding = [known for known in names if name.casefold() in known.casefold()]
    return (holding or difflib.get_close_matches(name, names, n=MOST_MEANT))[:MOST_MEANT]


def _listed(names: list[str]) -> str:
    return " or ".join([*names[:MOST_MEANT], *(["others"] if len(names) > MOST_MEANT else [])])


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
