"""Saves a conversation to its file as it changes."""

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
    """A conversation whose events are saved as they are applied. Every event is applied with `add`.

    The file is created when the first question or answer is added. If it cannot be written, a note is printed once and
    the conversation continues without being saved.
    """

    def __init__(self, store: Store, conversation: Conversation, saved: Journal | OlderFile | None = None) -> None:
        self.conversation = conversation
        self._store = store
        self._saved = saved
        self._given_up = False

    def add(self, event: Event) -> None:
        """Apply an event and save it. Raises Misplaced (a bug in the caller) if the event is not allowed now."""
        self._save(self._make_ready, event)
        self.conversation.apply(event)
        self._save(self._write, event)

    @property
    def path(self) -> Path | None:
        """The file of the conversation, or None if it is not saved."""
        return self._saved.path if self._saved else None

    @property
    def is_given_up(self) -> bool:
        """True if the conversation could not be saved."""
        return self._given_up

    def close(self) -> None:
        """Close and unlock the file, or delete it if the conversation has no questions. Idempotent."""
        saved, self._saved = self._saved, None
        if isinstance(saved, Journal) and not self.conversation.exchanges:
            with contextlib.suppress(OSError):  # a file without questions is never listed
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
        """Prepare to save an event: create or convert the file if necessary, and complete an interrupted answer."""
        if isinstance(self._saved, OlderFile):
            self._saved = self._store.convert(self._saved, self.conversation)
        elif self._saved is None and isinstance(event, AnswerBegan) and self.conversation.exchanges:
            self._saved = self._store.begin(self.conversation)
        elif self._saved is not None and self._saved.is_answering and not isinstance(event, Piece | AnswerEnded):
            self._write_answer(self._saved)  # a previous process died during this answer

    def _write(self, event: Event) -> None:
        if self._saved is None:
            if isinstance(event, QuestionAsked):
                self._saved = self._store.begin(self.conversation)
            return
        assert isinstance(self._saved, Journal)  # `_make_ready` has run
        if isinstance(event, Piece):
            self._saved.write_piece(event)
        elif isinstance(event, AnswerEnded):
            self._write_answer(self._saved)
        else:
            self._saved.write(event)
            if isinstance(event, QuestionAsked) and len(self.conversation.exchanges) == 1:
                with contextlib.suppress(OSError):  # the old name is still valid; Windows cannot rename open files
                    self._store.rename(self._saved, self.conversation)

    def _write_answer(self, journal: Journal) -> None:
        answered = self.conversation.exchanges[-1].answered()
        assert answered is not None
        journal.write(answered)

    def _give_up(self, path: Path, error: OSError) -> None:
        self._given_up = True
        if self._saved is not None:
            self._saved.close()
            self._saved = None
        out.note(f"this conversation is no longer being saved: {path}: {error.strerror or error}")


def resume_conversation(store: Store, path: Path) -> tuple[ConversationRecord, Recording]:
    """Continue a saved conversation in its file, or in a new file if another process is writing to the old one.

    If the file is in an older format, it is converted when the first event is added. Raises LlmrunError if the file is
    damaged, and OSError if it cannot be read.
    """
    if store.is_saved_copy(path):
        found = read_conversation(path)
        return ConversationRecord(store, found.conversation), found
    lock = None
    try:
        lock = lock_journal(path)
    except InUse:
        out.note("that conversation is open in another process, so this chat continues a copy")
    except OSError:  # the folder is not writable; this is reported when the first question is saved
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
    """Open the file for writing. Returns None if the file is read-only; a new file will then be created."""
    try:
        if found.conversation.began.format >= FORMAT:
            return Journal(found.path, found.whole_bytes, lock, found.answering_bytes)
        if os.access(found.path, os.W_OK):
            return OlderFile(found.path, lock)
    except PermissionError:
        pass
    lock.release()
    return None
