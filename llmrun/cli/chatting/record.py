"""A conversation together with the file it is saved in as it goes."""

from __future__ import annotations

from pathlib import Path

from llmrun.cli.chatting.conversation import Conversation
from llmrun.cli.chatting.events import FORMAT, AnswerBegan, Event, QuestionAsked
from llmrun.cli.chatting.journal import InUse, Journal, Lock, lock_journal
from llmrun.cli.chatting.store import Recording, Store, read_conversation
from llmrun.cli.console.output import out


class ConversationRecord:
    """Every event goes through `add`: it happens, and it is written down.

    A conversation gets a file of its own with its first new question or answer. When that cannot be written, one note
    says so and the conversation goes on unsaved: the person is in the middle of a thought.
    """

    def __init__(self, store: Store, conversation: Conversation, journal: Journal | None = None) -> None:
        self.conversation = conversation
        self._store = store
        self._journal = journal
        self._given_up = False

    def add(self, event: Event) -> None:
        """Raises Misplaced when the event cannot happen now: a mistake of the caller."""
        self.conversation.apply(event)
        if self._given_up:
            return
        try:
            if self._journal is not None:
                self._journal.write(event)
            elif isinstance(event, QuestionAsked | AnswerBegan):
                self._journal = self._store.begin(self.conversation)
        except OSError as error:
            self._give_up(self._journal.path if self._journal else self._store.folder, error)

    @property
    def path(self) -> Path | None:
        """The file it is saved in, if it is."""
        return self._journal.path if self._journal else None

    def close(self) -> None:
        """Let others write to the file. Idempotent."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _give_up(self, path: Path, error: OSError) -> None:
        self._given_up = True
        self.close()
        out.note(f"this conversation is not saved from here on: {path}: {error.strerror or error}")


def take_up(store: Store, path: Path) -> tuple[ConversationRecord, Recording]:
    """Go on with a conversation from a file: in that file, if it is a journal of today's format that nobody else
    writes to, else in a new one. Raises LlmrunError when it is damaged, and OSError when it cannot be read."""
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
        journal = _opened(found, lock) if lock else None
    except BaseException:
        if lock:
            lock.release()
        raise
    return ConversationRecord(store, found.conversation, journal), found


def _opened(found: Recording, lock: Lock) -> Journal | None:
    """The journal it was found in, or None where that file alone cannot be written, or its format does not know all
    events: a new one begins then."""
    if found.conversation.began.format < FORMAT:
        lock.release()
        return None
    try:
        return Journal(found.path, found.whole_bytes, lock)
    except PermissionError:
        lock.release()
        return None
