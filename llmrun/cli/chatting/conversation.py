"""The state of a conversation, which results from applying its events."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from llmrun import __version__
from llmrun.base.types import FinishReason
from llmrun.cli.chatting.events import (
    FORMAT,
    AnswerBegan,
    Answered,
    AnswerEnded,
    AnswerWent,
    Began,
    Cleared,
    Event,
    ImageShown,
    ModelChanged,
    PreferenceSet,
    QuestionAsked,
    SystemSet,
    Thought,
    ToolAnswered,
    ToolCalled,
    Undone,
    Value,
    WasThinking,
)
from llmrun.cli.chatting.tool_call_view import parsed_arguments
from llmrun.engine.requests import ToolCall

TITLE_CHARACTERS = 60
_NO_RESULT = "The call was interrupted, and its result is unknown."


class Misplaced(ValueError):
    """An event is not allowed in the conversation's current state."""


@dataclass(slots=True)
class ToolRound:
    """An answer with tool calls and their results, which precedes the final answer.

    results  the results by call id; a call without a result was interrupted
    """

    answered: Answered
    calls: list[ToolCalled] = field(default_factory=list)
    results: dict[str, str] = field(default_factory=dict)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the message with the calls, then the messages with the results.

        Templates and servers reject arguments that are not a JSON object, so such arguments are left out. The result of
        the call then explains the error.
        """
        calls = [ToolCall(call.id, call.name, _valid(call.arguments)).as_message() for call in self.calls]
        thinking = {} if self.answered.thinking is None else {"reasoning_content": self.answered.thinking}
        yield {"role": "assistant", "content": self.answered.text, **thinking, "tool_calls": calls}
        for call in self.calls:
            result = self.result(call)
            yield {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result}

    def result(self, call: ToolCalled) -> str:
        """Return the result of a call, or a text that explains why the call has no result."""
        return self.results.get(call.id, _NO_RESULT)


@dataclass(slots=True)
class Exchange:
    """A question and its answer.

    rounds    the tool calls before the answer
    began     the beginning of the answer, or None if there is no answer yet
    thoughts  the thinking, in pieces
    pieces    the answer, in pieces
    ended     the end of the answer, or None if the answer has not ended
    """

    asked: QuestionAsked
    rounds: list[ToolRound] = field(default_factory=list)
    began: AnswerBegan | None = None
    thoughts: list[str] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    ended: AnswerEnded | None = None

    @property
    def question(self) -> str:
        """The text of the question, without its images."""
        return self.asked.text

    @property
    def content(self) -> str | list[dict[str, str]]:
        """The question as the content of a message: its text, or parts if it has images."""
        if not self.asked.images:
            return self.asked.text
        parts: list[dict[str, str]] = []
        for text, image in _split(self.asked):
            parts += [{"type": "text", "text": text}] if text else []
            parts += [] if image is None else [{"type": "image", "image": image.sha256}]
        return parts

    @property
    def answer(self) -> str:
        return "".join(self.pieces)

    @property
    def thinking(self) -> str:
        return "".join(self.thoughts)

    def answered(self) -> Answered | None:
        """Return the answer received so far as one event, or None if no answer has begun."""
        if self.began is None:
            return None
        ended = asdict(self.ended) if self.ended else {}
        return Answered(self.answer, self.thinking if self.thoughts else None, self.began.seed, **ended)

    def call(self, called: ToolCalled) -> None:
        """Add a tool call of the answer. The first call turns the answer into a round. May raise Misplaced."""
        answered = self.answered()
        if answered is not None:
            self.rounds.append(ToolRound(answered))
            self.began, self.thoughts, self.pieces, self.ended = None, [], [], None
        elif not self.rounds or self.rounds[-1].results:
            raise Misplaced("a tool call without an answer")
        self.rounds[-1].calls.append(called)

    def take(self, answered: Answered) -> None:
        """Replace the answer with a complete answer."""
        self.began = AnswerBegan(answered.seed)
        self.thoughts = [] if answered.thinking is None else [answered.thinking]
        self.pieces = [answered.text] if answered.text else []
        self.ended = None
        if answered.reason is not None:
            values = {field.name: getattr(answered, field.name) for field in fields(AnswerEnded)}
            self.ended = AnswerEnded(**values)


@dataclass(slots=True)
class Conversation:
    """A conversation, in which only the last exchange may lack an answer.

    recount  True if the model has changed since the tokens were counted with the last answer
    """

    began: Began
    model: str
    system: str | None = None
    preferences: dict[str, Value] = field(default_factory=dict)
    exchanges: list[Exchange] = field(default_factory=list)
    recount: bool = False

    def switched(self, model: str, before: str | None, after: str | None) -> Iterator[ModelChanged | SystemSet]:
        """Yield the events that continue the conversation with another model or preset.

        The conversation receives the new default system prompt unless the user has chosen another system prompt.

        before, after  the default system prompts of the old and the new model
        """
        yield ModelChanged(model)
        if self.system == before != after:
            yield SystemSet(after)

    def apply(self, event: Event) -> None:
        """Apply an event. If the event is not allowed in the current state, raise Misplaced and change nothing."""
        match event:
            case Began():
                raise Misplaced("a second `began` event")
            case ModelChanged(model):
                self.recount = bool(self.exchanges) and (self.recount or model != self.model)
                self.model = model
            case SystemSet(text):
                self.system = text
            case PreferenceSet(name, value):
                self.preferences.pop(name, None)
                if value is not None:
                    self.preferences[name] = value
            case QuestionAsked():
                if self.unanswered is not None:
                    raise Misplaced("a question before the last one was answered")
                self.exchanges.append(Exchange(event))
            case AnswerBegan():
                last = self._last()
                last.began, last.thoughts, last.pieces, last.ended = event, [], [], None
            case Thought(text):
                self._under_way().thoughts.append(text)
            case AnswerWent(text):
                self._under_way().pieces.append(text)
            case WasThinking():
                last = self._under_way()
                if last.pieces:
                    last.thoughts.append(last.answer)
                    last.pieces = []
            case AnswerEnded():
                self._under_way().ended = event
                self.recount = False
            case Answered():
                self._last().take(event)
                self.recount = False
            case ToolCalled():
                self._last().call(event)
            case ToolAnswered(call_id, text):
                if not any(call.id == call_id for call in self._last_calls()):
                    raise Misplaced("the result of an unknown tool call")
                self._last().rounds[-1].results[call_id] = text
            case Undone():
                self._last()
                self.exchanges.pop()
            case Cleared():
                self.exchanges.clear()

    @property
    def images(self) -> list[ImageShown]:
        """All images, in the order in which the model sees them."""
        return [image for exchange in self.exchanges for image in exchange.asked.images]

    def shown_question(self, exchange: Exchange) -> str:
        """Return a question as users see it, with a label for each image. Images are numbered in the conversation."""
        if not exchange.asked.images:
            return exchange.question
        number = 1
        for before in self.exchanges:
            if before is exchange:
                break
            number += len(before.asked.images)
        pieces: list[str] = []
        for text, image in _split(exchange.asked):
            pieces.append(text)
            if image is not None:
                pieces.append(image_label(number, image))
                number += 1
        return joined_words(pieces)

    def _last(self) -> Exchange:
        if not self.exchanges:
            raise Misplaced("nothing was asked yet")
        return self.exchanges[-1]

    def _last_calls(self) -> list[ToolCalled]:
        rounds = self._last().rounds
        return rounds[-1].calls if rounds else []

    def _under_way(self) -> Exchange:
        last = self._last()
        if last.began is None or last.ended is not None:
            raise Misplaced("no answer has begun")
        return last

    @property
    def unanswered(self) -> str | None:
        """The last question, or None if an answer or a tool call has followed the question."""
        waiting = self.exchanges and self.exchanges[-1].began is None and not self.exchanges[-1].rounds
        return self.exchanges[-1].question if waiting else None

    @property
    def has_calls(self) -> bool:
        """True if an answer has called tools."""
        return any(exchange.rounds for exchange in self.exchanges)

    @property
    def is_stopped_at_calls(self) -> bool:
        """True if the last answer has only tool calls, because the user stopped the answer or the process died.

        If the process died before it saved the calls, only the answer's finish reason shows that there were calls.
        """
        if not self.exchanges:
            return False
        last = self.exchanges[-1]
        if last.began is None:
            return bool(last.rounds)
        return last.ended is not None and last.ended.reason == FinishReason.TOOL_CALLS

    def messages(self, first: int = 0) -> list[dict[str, Any]]:
        """Return the messages to send for the last question, without the answer to that question.

        first  the index of the first exchange to include
        """
        told = self.all_messages(first)
        return told[:-1] if self.exchanges else told

    def all_messages(self, first: int = 0) -> list[dict[str, Any]]:
        """Return the system prompt and all questions, tool calls and answers. Missing answers become empty messages."""
        told: list[dict[str, Any]] = [] if self.system is None else [{"role": "system", "content": self.system}]
        for exchange in self.exchanges[first:]:
            told.append({"role": "user", "content": exchange.content})
            told += [message for one in exchange.rounds for message in one.messages()]
            thinking = {"reasoning_content": exchange.thinking} if exchange.thoughts else {}
            told.append({"role": "assistant", "content": exchange.answer, **thinking})
        return told

    @property
    def context_used(self) -> int:
        """The number of tokens in the context after the last completed answer, or 0 before the first such answer."""
        ended = [exchange.ended.context_used for exchange in self.exchanges if exchange.ended]
        return ended[-1] if ended else 0

    @property
    def is_counted(self) -> bool:
        """True if `context_used` covers all exchanges and was counted with the current model.

        The number of prompt tokens is 0 if an answer failed or if the server reported no counts.
        """
        if not self.exchanges:
            return True
        ended = self.exchanges[-1].ended
        return not self.recount and ended is not None and ended.prompt_tokens > 0

    @property
    def title(self) -> str:
        """The first question, shortened to one line. The text is untrusted."""
        if not self.exchanges:
            return "(nothing asked yet)"
        words = re.sub(r"\s+", " ", self.shown_question(self.exchanges[0]).strip())
        return words if len(words) <= TITLE_CHARACTERS else words[: TITLE_CHARACTERS - 1] + "…"

    def history(self) -> Iterator[Event]:
        """Yield the shortest sequence of events, in the current format, that produces this conversation."""
        yield replace(self.began, format=FORMAT)
        changed_last = self.recount and bool(self.exchanges)
        if self.model != self.began.model and not changed_last:
            yield ModelChanged(self.model)
        if self.system is not None:
            yield SystemSet(self.system)
        for name, value in self.preferences.items():
            yield PreferenceSet(name, value)
        for exchange in self.exchanges:
            yield exchange.asked
            for one in exchange.rounds:
                yield one.answered
                yield from one.calls
                yield from (ToolAnswered(call_id, text) for call_id, text in one.results.items())
            if answered := exchange.answered():
                yield answered
        if self.model != self.began.model and changed_last:
            yield ModelChanged(self.model)


def new_conversation(model: str) -> Conversation:
    """Return an empty conversation. `model` is a catalogue name, a URL or an absolute path, never a relative path."""
    return Conversation(Began(FORMAT, secrets.token_hex(8), model, now(), __version__), model)


def joined_words(pieces: Iterable[str]) -> str:
    """Join texts and labels, with a space between two of them unless there is one."""
    joined = ""
    for piece in pieces:
        joined += f" {piece}" if joined and piece and not (joined[-1].isspace() or piece[0].isspace()) else piece
    return joined


def image_label(number: int, image: ImageShown, more: str = "") -> str:
    """Return the text that stands for an image on screen: `[image 1: cat.jpg 1024x768]`. The name is untrusted."""
    return f"[image {number}: {image.name} {image.width}x{image.height}{more}]"


def _split(asked: QuestionAsked) -> Iterator[tuple[str, ImageShown | None]]:
    """Yield the pieces of a question, each followed by an image. The last piece has no image."""
    start = 0
    for image in asked.images:
        yield asked.text[start : image.at], image
        start = image.at
    yield asked.text[start:], None


def _valid(arguments: str) -> str:
    """Return the arguments of a call if they are a JSON object, or an empty object otherwise."""
    try:
        parsed_arguments(arguments)
    except ValueError:
        return "{}"
    return arguments


def now() -> str:
    """Return the current UTC time in ISO 8601 format, in whole seconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
