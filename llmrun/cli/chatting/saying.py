"""Saves and shows an answer while it streams."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from llmrun.base.types import FinishReason
from llmrun.cli.answers.collected import CollectedCalls
from llmrun.cli.answers.thinking import CertainAnswer, ThinkingView
from llmrun.cli.chatting.events import FAILED, AnswerBegan, AnswerEnded, AnswerWent, Thought, WasThinking
from llmrun.cli.console.output import out

if TYPE_CHECKING:
    from llmrun.cli.chatting.record import ConversationRecord
    from llmrun.cli.chatting.screen import AnswerView
    from llmrun.engine.requests import Finished, TextDelta, ToolCallDelta


class Saying:
    """One streaming answer to the last question. Every piece is saved before it is shown.

    The answer begins with the first text or tool call after the thinking. If the user stops it before then, the
    conversation does not change. If the `with` block raises an exception, the answer is marked as failed. If `stream`
    is false, the answer is shown only when it is complete.
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
        self._problem = ""  # why a tool call in a complete answer is not valid
        self._viewing = False  # True between the view's `begin` and `end`
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
        """Collect pieces of tool calls. They are shown when they are complete."""
        self._begin()
        self.calls.take(pieces)
        self._show(self._certain.rest())
        self._close_view()
        out.progress("writing a tool call")

    def was_thinking(self) -> None:
        """Mark the text of the answer so far as thinking."""
        if not self.begun:  # the last answer in the conversation is an older one, which this one will replace
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
            self._record.add(AnswerEnded(FAILED, self._used_before, 0, 0, 0, 0.0, 0.0))
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
            self._view.begin()

    def _close_view(self) -> None:
        if self._viewing:
            self._viewing = False
            self._view.end()
