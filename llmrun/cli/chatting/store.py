"""The folder of saved conversations. Each conversation is an append-only file, and /save makes copies.

    conversations/why-is-the-sky-blue.jsonl        a conversation, named after its first question, one line per event
    conversations/why-is-the-sky-blue.answering    the streaming answer: the size of the .jsonl file when the answer
                                                   began, then one line per piece of the answer
    conversations/why-is-the-sky-blue.5f2c81d0.kv  the saved state for one of its models (see context.py)
    conversations/saved/NAME.jsonl                 a copy, written atomically
    conversations/images/                          the images of all conversations (see image_files.py)
    conversations/.locks/                          the lock files of conversations that are open for writing

Folders are created with mode 0700 and files with mode 0600. Earlier versions of llmrun used file names such as
20261120-143012-1f3a9c2e.jsonl.

The .answering file exists while an answer streams, and is removed after the whole answer has been saved in the .jsonl
file. If the process dies before it removes the .answering file, the .jsonl file is larger than the recorded size, so
readers ignore the .answering file.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import stat
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.base.folders import O_BINARY, write_private
from llmrun.cli.chatting.conversation import Conversation, Misplaced
from llmrun.cli.chatting.events import Answered, Began, Event, Piece, from_line, to_line
from llmrun.engine.saved_state.budget import ENDING

if TYPE_CHECKING:
    from filelock import BaseFileLock

    from llmrun.base.types import ModelInfo
    from llmrun.cli.chatting.image_files import ImageFiles


class ConversationFileError(LlmrunError):
    """A conversation's file is damaged, or cannot be read or written."""


class InUse(ConversationFileError):
    """The journal is locked, because another process is writing to it."""


class Lock:
    """A lock on a journal. If the process dies, the operating system releases the lock."""

    def __init__(self, held: BaseFileLock, path: Path) -> None:
        self._held = held
        self._path = path

    def release(self) -> None:
        """Remove the lock file, then release the lock. This method is idempotent."""
        if self._held.is_locked:
            with contextlib.suppress(OSError):  # an empty lock file that is left behind is harmless
                self._path.unlink()
            self._held.release()


def lock_journal(path: Path) -> Lock:
    """Lock a journal for writing. Raises InUse if the journal is locked, and OSError if the folder is not writable."""
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


def state_path(path: Path, info: ModelInfo) -> Path:
    """Return the path of the file with the saved state for a model, given the path of the conversation's file.

    Each model and each set of adapters has its own file, so switching back to a model finds the model's state again.
    """
    digest = hashlib.sha256(repr((info.path, info.adapters)).encode()).hexdigest()
    return path.with_suffix(f".{digest[:8]}{ENDING}")


def take_over_old_state(path: Path, file: Path) -> None:
    """Rename the state that an earlier version of llmrun saved for a conversation, unless `file` exists."""
    if not file.exists():
        with contextlib.suppress(OSError):  # usually, there is no such file; otherwise, the state is computed again
            path.with_suffix(ENDING).rename(file)


class Journal:
    """Appends events to a locked file. Written events survive a crash of the process."""

    def __init__(self, path: Path, whole_bytes: int, lock: Lock, answering_bytes: int | None = None) -> None:
        """Open a conversation's file and remove its last line if it is incomplete. Raises OSError.

        whole_bytes      size of the file's complete lines
        answering_bytes  size of complete lines in the .answering file, or None if the file is missing or out of date
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
        """Append an event to the conversation's file. For a complete answer, sync the file and remove the pieces.

        Raises OSError like `write_piece`, in which case the pieces are kept.
        """
        self._messages.append(to_line(event))
        if isinstance(event, Answered):
            self._messages.sync()
            if self._answer is not None:
                self._close_answer()
                with contextlib.suppress(OSError):  # readers recognize that the file is out of date
                    answering_path(self.path).unlink()

    def close(self) -> None:
        """Close the files and release the lock. This method is idempotent."""
        self._close_files()
        self._lock.release()

    def discard(self) -> None:
        """Remove the files and close the journal. Raises OSError."""
        self._close_files()
        try:
            remove_files(self.path)
        finally:
            self.close()

    def _close_files(self) -> None:
        self._messages.close()
        self._close_answer()

    def _close_answer(self) -> None:
        if self._answer is not None:
            self._answer.close()
            self._answer = None


def new_journal(path: Path, conversation: Conversation, lock: Lock) -> Journal:
    """Write a conversation to its locked file, replacing an older file atomically. Raises OSError."""
    _write_whole(path, conversation)
    return Journal(path, path.stat().st_size, lock)


def remove_files(path: Path) -> None:
    """Remove a conversation's file, its streaming answer and its saved states. Raises OSError."""
    for state in path.parent.glob(f"{path.stem}.*{ENDING}"):
        state.unlink(missing_ok=True)
    path.with_suffix(ENDING).unlink(missing_ok=True)  # saved by an earlier version of llmrun
    answering_path(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


class _Appended:
    """An open file to which only complete lines are appended."""

    def __init__(self, path: Path, whole_bytes: int) -> None:
        self.size = whole_bytes
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | O_BINARY)
        try:
            # Truncate only if necessary, because truncating always changes the file's mtime.
            if os.fstat(self._descriptor).st_size != whole_bytes:
                os.ftruncate(self._descriptor, whole_bytes)
        except BaseException:
            self.close()
            raise

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


CONVERSATION_ENDING = ".jsonl"
LARGEST_FILE = 64 << 20  # maximum size in bytes, which is enough for a million tokens of answers
LONGEST_NAME = 64  # maximum characters in a name chosen by the user
LONGEST_OWN_NAME = 40  # maximum characters in a name made from a question's first words
MOST_WORDS = 6
MOST_MEANT = 3  # maximum number of names that a hint suggests
_DAMAGE_HINT = "llmrun chat starts a new conversation"
_HEAD = re.compile(rb'\{"after": (\d{1,18})\}')
_APOSTROPHES = {ord(character): None for character in "'\u2019"}


@dataclass(frozen=True, slots=True)
class Recording:
    """A conversation that was read from a file.

    whole_bytes      size of the file's complete lines, without a partial last line that a crash may have left
    answering_bytes  size of complete lines in the .answering file, or None if there is no such file
    changed          modification time in seconds since the epoch
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
    """The conversations in one folder. The folder does not have to exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def images(self) -> ImageFiles:
        """The images of all conversations."""
        from llmrun.cli.chatting.image_files import ImageFiles  # commands that show no conversation need no images

        return ImageFiles(self.folder / "images")

    def latest(self) -> Path | None:
        """Return the most recently written journal that has at least one question.

        Damaged journals are included, so that the user learns about the damage.
        """
        return next((path for path in self.journals() if not _is_empty(path)), None)

    def journals(self) -> list[Path]:
        """Return all journals, most recently written first. Raises OSError if the folder cannot be read."""
        return _by_change(self.folder)

    def named(self) -> list[Path]:
        """Return the copies made by /save, newest first."""
        return _by_change(self.folder / "saved")

    def find(self, typed: str, command: str) -> Path:
        """Find a saved copy or a journal by its name or a unique prefix of the name.

        Raises UsageError, with a message that begins with `command`.
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
        """Return the saved copy or the journal with exactly this name, or None. `name` can be any string."""
        paths = [*self.named(), *self.journals()]
        return next((path for path in paths if path.stem == unicodedata.normalize("NFC", name.strip())), None)

    def is_saved_copy(self, path: Path) -> bool:
        return path.parent == self.folder / "saved"

    def begin(self, conversation: Conversation) -> Journal:
        """Create a journal that contains the conversation so far. Raises OSError."""
        _make_folder(self.folder)
        path, lock = self._new_path(conversation)
        try:
            return new_journal(path, conversation, lock)
        except BaseException:
            lock.release()
            raise

    def _new_path(self, conversation: Conversation) -> tuple[Path, Lock]:
        """Find an unused name and lock it."""
        asked = conversation.exchanges[0].asked
        words = name_for(asked.text if asked.text.strip() or not asked.images else Path(asked.images[0].name).stem)
        for number in itertools.count(1):
            name = words if number == 1 else f"{words}-{number}"
            path = self.folder / f"{name}{CONVERSATION_ENDING}"
            if path.exists() or self._saved(name).exists():
                continue
            try:
                lock = lock_journal(path)
            except InUse:
                continue
            if not path.exists():
                return path, lock
            lock.release()  # another process has used the name in the meantime
        raise AssertionError("itertools.count never ends")

    def save(self, name: str, conversation: Conversation) -> Path:
        """Save a named copy, replacing an older copy of the same conversation. Raises UsageError and OSError."""
        name = checked_name(name)
        path = self._saved(name)
        if path.exists() and read_conversation(path).conversation.began.conversation != conversation.began.conversation:
            raise UsageError(
                f"/save: {name}: another conversation has this name",
                hint="choose another name, or remove " + str(path),
            )
        if (self.folder / f"{name}{CONVERSATION_ENDING}").exists():
            raise UsageError(f"/save: {name}: a conversation already has this name", hint="choose another name")
        _make_folder(self.folder)
        _make_folder(path.parent)
        _write_whole(path, conversation)
        return path

    def remove(self, path: Path) -> None:
        """Remove a conversation or a saved copy, and the images that no other conversation shows.

        Raises OSError, and InUse if a chat is writing to the file.
        """
        if self.is_saved_copy(path):
            path.unlink()
        else:
            lock = lock_journal(path)
            try:
                remove_files(path)
            finally:
                lock.release()
        self.remove_unused_images()

    def remove_unused_images(self) -> None:
        """Remove the images that no conversation and no saved copy shows. Raises OSError."""
        self.images.remove_unused(lambda: [*self.journals(), *self.named()])

    def _saved(self, name: str) -> Path:
        return self.folder / "saved" / f"{name}{CONVERSATION_ENDING}"


@contextlib.contextmanager
def reporting_file_errors(command: str) -> Iterator[None]:
    """Convert any OSError to a ConversationFileError whose message begins with `command`."""
    try:
        yield
    except OSError as error:
        raise ConversationFileError(f"{command}: {error.filename or 'file'}: {error.strerror or error}") from error


def read_conversation(path: Path) -> Recording:
    """Read a conversation's file, and the pieces of an unfinished answer if there is one.

    A partial last line is ignored. Raises ConversationFileError, with the line number, if another line is invalid, and
    OSError if the file cannot be read.
    """
    try:
        # Read the pieces first, because a writer removes the pieces only after appending the answer to the .jsonl file.
        pieces = _read(answering_path(path))
    except FileNotFoundError:
        pieces = None
    messages = _read(path)
    conversation: Conversation | None = None
    for number, line in messages.lines():
        with _reporting_damage(path, number):
            event = from_line(line)
            if conversation is not None:
                conversation.apply(event)
            elif isinstance(event, Began):
                conversation = Conversation(event, event.model)
            else:
                raise Misplaced("the first event must be `began`")
    if conversation is None:
        raise ConversationFileError(f"conversation is damaged: {path}: no complete line", hint=_DAMAGE_HINT)
    answering_bytes = None
    if pieces is not None and _continue_with(pieces, conversation, messages.whole, answering_path(path)):
        answering_bytes = pieces.whole
    changed = max(messages.changed, pieces.changed if pieces else 0)
    return Recording(path, conversation, messages.whole, answering_bytes, changed)


def _continue_with(pieces: _Content, conversation: Conversation, after: int, path: Path) -> bool:
    """Apply the pieces of an unfinished answer. Returns False if there are no pieces or if they are out of date."""
    began = False
    for number, line in pieces.lines():
        with _reporting_damage(path, number):
            if number > 1:
                event = from_line(line)
                if not isinstance(event, Piece):
                    raise Misplaced("this is not a piece of an answer")
                conversation.apply(event)
                began = True
            elif not (head := _HEAD.fullmatch(line)):
                raise Misplaced("it does not begin with a file size")
            elif int(head[1]) != after:
                break
    return began


@dataclass(frozen=True, slots=True)
class _Content:
    """The content of a file. The first `whole` bytes consist of complete lines."""

    data: bytes
    whole: int
    changed: float

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield each complete line without its newline, preceded by its line number (from 1)."""
        yield from enumerate(self.data[: self.whole].split(b"\n")[:-1], 1)


def _read(path: Path) -> _Content:
    if not stat.S_ISREG(path.stat().st_mode):  # reading from a pipe or a device might never end
        raise ConversationFileError(f"conversation: {path}: not a file")
    with path.open("rb") as file:
        data = file.read(LARGEST_FILE + 1)
        changed = os.fstat(file.fileno()).st_mtime
    if len(data) > LARGEST_FILE:
        raise ConversationFileError(f"conversation: {path}: larger than {LARGEST_FILE >> 20} MiB")
    return _Content(data, data.rfind(b"\n") + 1, changed)


@contextlib.contextmanager
def _reporting_damage(path: Path, number: int) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConversationFileError(
            f"conversation is damaged: {path}: line {number}: {error}", hint=_DAMAGE_HINT
        ) from None


def _is_empty(path: Path) -> bool:
    """Return whether a conversation has no questions. Unreadable files do not count as empty."""
    try:
        return not read_conversation(path).conversation.exchanges
    except (ConversationFileError, OSError):
        return False


def name_for(question: str) -> str:
    """Return a short name made from the first words of a question, such as `why-is-the-sky-blue`."""
    plain = unicodedata.normalize("NFC", question[:1000]).lower().translate(_APOSTROPHES)
    name = ""
    for word in re.findall(r"[^\W_]+", plain)[:MOST_WORDS]:
        longer = f"{name}-{word}" if name else word[:LONGEST_OWN_NAME]
        if len(longer) > LONGEST_OWN_NAME:
            break
        name = longer
    return unicodedata.normalize("NFC", name) or "chat"


def checked_name(name: str) -> str:
    """Check that a name is safe to use as a file name, and normalize it to NFC. Raises UsageError."""
    name = unicodedata.normalize("NFC", name.strip())
    allowed = all(character.isalnum() or character in " ._-" for character in name)
    if not allowed or not name or name[0] in ".-" or name[-1] == "." or len(name) > LONGEST_NAME:
        raise UsageError(
            f"{name!r:.80} is not a valid conversation name",
            hint=f"use up to {LONGEST_NAME} letters, digits, spaces and . _ -, with a letter or digit at each end",
        )
    if len(os.fsencode(name)) > 200:  # file systems allow 255 bytes, including the extension
        raise UsageError(f"{name!r:.80} is too long for a file name", hint="choose a shorter name")
    return name


def _nearest(name: str, names: list[str]) -> list[str]:
    """Return the names that contain `name` or, if no name does, the names with a similar spelling."""
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
        with contextlib.suppress(OSError):  # the file was removed after it was listed
            if entry.is_file():
                dated.append((entry.stat().st_mtime_ns, entry.name))
    return [folder / name for _, name in sorted(dated, reverse=True)]


def _make_folder(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def _write_whole(path: Path, conversation: Conversation) -> None:
    """Replace a file atomically. Readers see either the old file or the complete new file."""
    write_private(path, b"".join(map(to_line, conversation.history())))
