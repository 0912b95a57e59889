"""Saves a conversation as it changes, and shows each answer as it streams."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from llmrun.base.types import FinishReason
from llmrun.cli.answers.answering import CollectedCalls
from llmrun.cli.answers.thinking import CertainAnswer, ThinkingView
from llmrun.cli.chatting.conversation import Conversation
from llmrun.cli.chatting.events import (
    FAILED,
    FORMAT,
    AnswerBegan,
    AnswerEnded,
    AnswerWent,
    Event,
    ImageShown,
    Piece,
    QuestionAsked,
    Thought,
    WasThinking,
)
from llmrun.cli.chatting.image_files import ImageFileError
from llmrun.cli.chatting.store import (
    InUse,
    Journal,
    Lock,
    Recording,
    Store,
    lock_journal,
    new_journal,
    read_conversation,
)
from llmrun.cli.console.output import out

if TYPE_CHECKING:
    from llmrun.cli.chatting.plain import AnswerView
    from llmrun.engine.requests import Finished, TextDelta, ToolCallDelta


class ConversationRecord:
    """A conversation whose events are saved as they are applied. Every event is applied with `add`.

    The file is created when the first question or answer is added. If the file cannot be written, a note is printed
    once, the conversation continues without being saved, and `is_given_up` is true.
    """

    def __init__(self, store: Store, conversation: Conversation, saved: Journal | None = None) -> None:
        self.conversation = conversation
        self._store = store
        self._saved = saved
        self._images: dict[str, bytes] = {}  # the files of images by SHA-256
        self.is_given_up = False

    def hold(self, sha256: str, data: bytes) -> None:
        """Provide the file of an image, before a question that shows the image is added."""
        self._images[sha256] = data

    def hold_stored(self) -> None:
        """Read all images of this conversation, whose file may be removed before the conversation has a new file."""
        for shown in self.conversation.images:
            with contextlib.suppress(ImageFileError):  # the next question reports the error
                self.image(shown)

    def image(self, shown: ImageShown) -> bytes:
        """Return the file of an image of this conversation. Raises ImageFileError."""
        if shown.sha256 not in self._images:
            self._images[shown.sha256] = self._store.images.read(shown)
        return self._images[shown.sha256]

    def add(self, event: Event) -> None:
        """Apply an event and save it. Raises Misplaced (a bug in the caller) if the event is not allowed now."""
        self._save(self._make_ready, event)
        self.conversation.apply(event)
        self._save(self._write, event)

    @property
    def path(self) -> Path | None:
        """The file of the conversation, or None if the conversation is not saved."""
        return self._saved.path if self._saved else None

    def close(self) -> None:
        """Close and unlock the file, or delete it if the conversation has no questions. This method is idempotent."""
        saved, self._saved = self._saved, None
        if saved is not None and not self.conversation.exchanges:
            with contextlib.suppress(OSError):  # a file without questions is never listed
                saved.discard()
                if self._images:
                    self._store.remove_unused_images()
        elif saved is not None:
            saved.close()

    def _save(self, step: Callable[[Event], None], event: Event) -> None:
        if self.is_given_up:
            return
        try:
            step(event)
        except OSError as error:
            self._give_up(self._saved.path if self._saved else self._store.folder, error)

    def _make_ready(self, event: Event) -> None:
        """Prepare to save an event: create the file if necessary, and complete an interrupted answer."""
        if isinstance(event, QuestionAsked) and not self.conversation.exchanges:
            self.close()  # the file was named after a question that was undone
        elif self._saved is None and isinstance(event, AnswerBegan) and self.conversation.exchanges:
            self._begin()
        elif self._saved is not None and self._saved.is_answering and not isinstance(event, Piece | AnswerEnded):
            self._write_answer(self._saved)  # a previous process died during this answer

    def _write(self, event: Event) -> None:
        if self._saved is None:
            if isinstance(event, QuestionAsked):
                self._begin()
        elif isinstance(event, QuestionAsked) and event.images:
            with self._store.images.saving((shown, self.image(shown)) for shown in event.images):
                self._saved.write(event)
        elif isinstance(event, Piece):
            self._saved.write_piece(event)
        elif isinstance(event, AnswerEnded):
            self._write_answer(self._saved)
        else:
            self._saved.write(event)

    def _begin(self) -> None:
        with self.saving_images():
            self._saved = self._store.begin(self.conversation)

    @contextlib.contextmanager
    def saving_images(self) -> Iterator[None]:
        """Store the images of this conversation while the block saves the conversation in a new file. Raises OSError.

        Images that were stored before may be gone, because no file showed them any more.
        """
        held = [
            (shown, self._images[shown.sha256]) for shown in self.conversation.images if shown.sha256 in self._images
        ]
        with self._store.images.saving(held) if held else contextlib.nullcontext():
            yield

    def _write_answer(self, journal: Journal) -> None:
        answered = self.conversation.exchanges[-1].answered()
        assert answered is not None
        journal.write(answered)

    def _give_up(self, path: Path, error: OSError) -> None:
        self.is_given_up = True
        if self._saved is not None:
            self._saved.close()
            self._saved = None
        out.note(f"this conversation is no longer being saved: {path}: {error.strerror or error}")


def resume_conversation(store: Store, path: Path) -> tuple[ConversationRecord, Recording]:
    """Continue a saved conversation in its file, or in a new file if another process is writing to the old file.

    A file in an older format is converted. Raises LlmrunError if the file is damaged, and OSError if it is unreadable.
    """
    if store.is_saved_copy(path):
        found = read_conversation(path)
        out.note(f"{path.stem} is a copy, which stays as it is: this chat continues in a new file")
        record = ConversationRecord(store, found.conversation)
        record.hold_stored()
        return record, found
    lock = None
    try:
        lock = lock_journal(path)
    except InUse:
        out.note("the conversation is open in another process, so this chat continues a copy")
    except OSError:  # an unwritable folder is reported when the first question is saved
        pass
    try:
        found = read_conversation(path)
        saved = _opened(found, lock) if lock else None
    except BaseException:
        if lock:
            lock.release()
        raise
    record = ConversationRecord(store, found.conversation, saved)
    if saved is None:
        record.hold_stored()
    return record, found


def _opened(found: Recording, lock: Lock) -> Journal | None:
    """Open the file for writing. Returns None if the file cannot be opened; a new file will then be created."""
    try:
        if found.conversation.began.format >= FORMAT:
            return Journal(found.path, found.whole_bytes, lock, found.answering_bytes)
        if os.access(found.path, os.W_OK):
            return new_journal(found.path, found.conversation, lock)
    except OSError:
        pass
    lock.release()
    return None


class Saying:
    """One streaming answer to the last question. Every piece is saved before it is shown.

    The answer begins with the first text or tool call after the thinking. If the user stops the answer before it
    begins, the conversation does not change. If the `with` block raises an exception, the answer is marked as failed.
    If `stream` is false, the answer is shown only when it is complete.
    """

    def __init__(
        self,
        record: ConversationRecord,
        view: AnswerView,
        seed: int | None,
        *,
        hide_thinking: bool = False,
        stream: bool = True,
    ) -> None:
        self._record = record
        self._view = view
        self._seed = seed
        self._thinking = ThinkingView(hidden=hide_thinking, stream=stream)
        self._certain = CertainAnswer(stream=stream)
        self._thoughts = ""  # the thinking received before the answer began
        self._used_before = record.conversation.context_used
        self._ended = False
        self._problem = ""  # the reason why a tool call in a complete answer is not valid
        self._viewing = False  # True while the view is showing the answer
        self.begun = False
        self.calls = CollectedCalls()

    def take(self, delta: TextDelta) -> None:
        if delta.unopened:
            self.was_thinking()
        if delta.reasoning:
            self.thought(delta.reasoning)
        if delta.text:
            self.text(delta)
        if delta.tool_calls:
            self.call(delta.tool_calls)

    def text(self, delta: TextDelta) -> None:
        self._begin()
        self._open_view()
        self._record.add(AnswerWent(delta.text))
        self._show(self._certain.passed(delta))

    def thought(self, piece: str) -> None:
        if not self.begun:
            self._thoughts += piece
            self._thinking.text(piece)
            return
        self._record.add(Thought(piece))
        self._close_view()
        self._thinking.text(piece)

    def call(self, pieces: Sequence[ToolCallDelta]) -> None:
        """Collect the pieces of tool calls. Only complete calls are shown."""
        self._begin()
        self.calls.take(pieces)
        self._show(self._certain.rest())
        self._close_view()
        out.progress("writing a tool call")

    def was_thinking(self) -> None:
        """Mark the text of the answer so far as thinking."""
        if not self.begun:  # the conversation still contains the older answer, which the new answer will replace
            return
        self._record.add(WasThinking())
        if held := self._certain.rest():
            self._thinking.text(held)
        else:
            self._close_view()
            out.answer_was_thinking()
        self._open_view()

    def finish(self, finished: Finished) -> None:
        if not self.begun:
            self._begin()
            self._open_view()
        self._ended = True
        if finished.reason in (FinishReason.TOOL_CALLS, FinishReason.STOP):
            self._problem = self.calls.problem
        timings = finished.timings
        self._record.add(
            AnswerEnded(
                reason=str(finished.reason),
                context_used=finished.context_used,
                prompt_tokens=timings.prompt_tokens,
                cached_tokens=timings.cached_tokens,
                generated_tokens=timings.generated_tokens,
                ttft_s=round(timings.ttft_s, 6),
                decode_s=round(timings.decode_s, 6),
            )
        )

    def __enter__(self) -> Saying:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        out.clear_progress()
        self._thinking.end()
        if not self.begun:
            return
        if not self._ended:
            self._record.add(AnswerEnded(FAILED, self._used_before))
        self._show(self._certain.rest())
        self._close_view()
        if self._problem:
            out.note(f"a tool call is not valid, so it did not run: {self._problem}")

    def _begin(self) -> None:
        if not self.begun:
            self.begun = True
            out.clear_progress()
            self._record.add(AnswerBegan(self._seed))
            if self._thoughts:
                self._record.add(Thought(self._thoughts))

    def _show(self, piece: str) -> None:
        if piece:
            self._open_view()
            self._view.text(piece)

    def _open_view(self) -> None:
        if not self._viewing:
            self._viewing = True
            out.clear_progress()

    def _close_view(self) -> None:
        if self._viewing:
            self._viewing = False
            self._view.end()
