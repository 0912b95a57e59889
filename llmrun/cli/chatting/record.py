"""A conversation together with the file it is saved in as it goes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from llmrun.cli.chatting.conversation import Conversation
from llmrun.cli.chatting.events import FORMAT, AnswerBegan, AnswerEnded, Event, Piece, QuestionAsked
from llmrun.cli.chatting.journal import InUse, Journal, Lock, OlderFile, lock_journal
from llmrun.cli.chatting.store import Recording, Store, read_conversation
from llmrun.cli.console.output import out


class ConversationRecord:
    """Every event goes through `add`: it happens, and it is written down.

    A conversation gets a file of its own with its first new question or answer. When that cannot be written, one note
    says so and the conversation goes on unsaved: the person is in the middle of a thought.
    """

    def __init__(self, store: Store, conversation: Conversation, saved: Journal | OlderFile | None = None) -> None:
        self.conversation = conversation
        self._store = store
        self._saved = saved
        self._given_up = False

    def add(self, event: Event) -> None:
        """Let an event happen, and save it. Raises Misplaced when it cannot happen now: a mistake of the caller."""
        self._save(self._make_ready, event)
        self.conversation.apply(event)
        self._save(self._write, event)

    @property
    def path(self) -> Path | None:
        """The file it is saved in, if it is."""
        return self._saved.path if self._saved else None

    @property
    def is_given_up(self) -> bool:
        """Whether the conversation could not be saved."""
        return self._given_up

    def close(self) -> None:
        """Let others write to the file; remove the file of a conversation in which nothing is said. Idempotent."""
        saved, self._saved = self._saved, None
        if isinstance(saved, Journal) and not self.conversation.exchanges:
            with contextlib.suppress(OSError):  # an empty conversation is never listed
                saved.discard()
        elif saved is not None:
            saved.close()

    def _save(self, step: Callable[[Event], None], event: Event) -> None:
        if self._given_up:
            return
        try:
            step(event)
        except OSError as error:
            self._give_up(self._saved.path if self._saved else self._store.folder, error)

    def _make_ready(self, event: Event) -> None:
        """Before an event: see to it that the file holds everything up to here, in today's format."""
        if isinstance(self._saved, OlderFile):
            self._saved = self._store.convert(self._saved, self.conversation)
        elif self._saved is None and isinstance(event, AnswerBegan) and self.conversation.exchanges:
            self._saved = self._store.begin(self.conversation)
        elif self._saved is not None and self._saved.is_answering and not isinstance(event, Piece | AnswerEnded):
            self._write_answer(self._saved)  # an earlier process died in it

    def _write(self, event: Event) -> None:
        if self._saved is None:
            if isinstance(event, QuestionAsked):
                self._saved = self._store.begin(self.conversation)
            return
        assert isinstance(self._saved, Journal)  # `_make_ready` was here
        if isinstance(event, Piece):
            self._saved.write_piece(event)
        elif isinstance(event, AnswerEnded):
            self._write_answer(self._saved)
        else:
            self._saved.write(event)

    def _write_answer(self, journal: Journal) -> None:
        answered = self.conversation.exchanges[-1].answered()
        assert answered is not None
        journal.write(answered)

    def _give_up(self, path: Path, error: OSError) -> None:
        self._given_up = True
        if self._saved is not None:
            self._saved.close()
            self._saved = None
        out.note(f"this conversation is not saved from here on: {path}: {error.strerror or error}")


def take_up(store: Store, path: Path) -> tuple[ConversationRecord, Recording]:
    """Go on with a conversation from a file: in that file, if nobody else writes to it, else in a new one. A file of an
    older format is converted with the first event. Raises LlmrunError when it is damaged, and OSError when it cannot be
    read."""
    if store.is_saved_copy(path):
        found = read_conversation(path)
        return ConversationRecord(store, found.conversation), found
    lock = None
    try:
        lock = lock_journal(path)
    except InUse:
        out.note("that conversation is open in another process: this is a copy of it")
    except OSError:  # a folder that cannot be written: the first question will find that out, and say so
        pass
    try:
        found = read_conversation(path)
        saved = _opened(found, lock) if lock else None
    except BaseException:
        if lock:
            lock.release()
        raise
    return ConversationRecord(store, found.conversation, saved), found


def _opened(found: Recording, lock: Lock) -> Journal | OlderFile | None:
    """Return the file it was found in, or None where that file alone cannot be written: a new one begins then."""
    try:
        if found.conversation.began.format >= FORMAT:
            return Journal(found.path, found.whole_bytes, lock, found.answering_bytes)
        if os.access(found.path, os.W_OK):
            return OlderFile(found.path, lock)
    except PermissionError:
        pass
    lock.release()
    return None
