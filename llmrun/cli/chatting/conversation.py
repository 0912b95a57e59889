"""A conversation: what its events come to."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from llmrun import __version__
from llmrun.cli.chatting.events import (
    FORMAT,
    AnswerBegan,
    AnswerEnded,
    AnswerWent,
    Began,
    Cleared,
    Event,
    ModelChanged,
    PreferenceSet,
    QuestionAsked,
    SystemSet,
    Thought,
    Undone,
)
from llmrun.cli.chatting.preferences import Value

TITLE_CHARACTERS = 60


class Misplaced(ValueError):
    """An event that cannot come here."""


@dataclass(slots=True)
class Exchange:
    """A question and its answer. `began` is None while there is no answer, `ended` while it has not ended. `thoughts`
    are what the model thought for the answer."""

    asked: QuestionAsked
    began: AnswerBegan | None = None
    thoughts: list[str] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    ended: AnswerEnded | None = None

    @property
    def question(self) -> str:
        return self.asked.text

    @property
    def answer(self) -> str:
        return "".join(self.pieces)

    @property
    def thinking(self) -> str:
        return "".join(self.thoughts)


@dataclass(slots=True)
class Conversation:
    """Only the last exchange may be without an answer."""

    began: Began
    model: str
    system: str | None = None
    preferences: dict[str, Value] = field(default_factory=dict)
    exchanges: list[Exchange] = field(default_factory=list)

    def apply(self, event: Event) -> None:
        """Let an event happen. Raises Misplaced, and nothing has changed, when it cannot happen now."""
        match event:
            case Began():
                raise Misplaced("a second beginning")
            case ModelChanged(model):
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
            case AnswerEnded():
                self._under_way().ended = event
            case Undone():
                self._last()
                self.exchanges.pop()
            case Cleared():
                self.exchanges.clear()

    def _last(self) -> Exchange:
        if not self.exchanges:
            raise Misplaced("nothing was asked yet")
        return self.exchanges[-1]

    def _under_way(self) -> Exchange:
        last = self._last()
        if last.began is None or last.ended is not None:
            raise Misplaced("no answer is under way")
        return last

    @property
    def unanswered(self) -> str | None:
        """The question that waits for its answer, if one does."""
        waiting = self.exchanges and self.exchanges[-1].began is None
        return self.exchanges[-1].question if waiting else None

    @property
    def messages(self) -> list[dict[str, str]]:
        """What the engine is given to answer the last question: all of it but that question's own answer."""
        return self.messages_from(0)

    def messages_from(self, first: int) -> list[dict[str, str]]:
        """Return `messages` without the exchanges before this one; the system prompt stays."""
        told = [] if self.system is None else [{"role": "system", "content": self.system}]
        for exchange in self.exchanges[first:]:
            told.append({"role": "user", "content": exchange.question})
            thinking = {"reasoning_content": exchange.thinking} if exchange.thoughts else {}
            told.append({"role": "assistant", "content": exchange.answer, **thinking})
        return told[:-1] if self.exchanges else told

    @property
    def message_count(self) -> int:
        return sum(1 if exchange.began is None else 2 for exchange in self.exchanges)

    @property
    def context_used(self) -> int:
        """Tokens it filled at the end of the last answer that came to an end; 0 without one."""
        ended = [exchange.ended.context_used for exchange in self.exchanges if exchange.ended]
        return ended[-1] if ended else 0

    @property
    def title(self) -> str:
        """The first question, on one short line; foreign text."""
        if not self.exchanges:
            return "(nothing asked yet)"
        words = re.sub(r"\s+", " ", self.exchanges[0].question.strip())
        return words if len(words) <= TITLE_CHARACTERS else words[: TITLE_CHARACTERS - 1] + "…"

    def history(self) -> Iterator[Event]:
        """The shortest way here: events that make an equal conversation, in the format of today."""
        yield replace(self.began, format=FORMAT)
        if self.model != self.began.model:
            yield ModelChanged(self.model)
        if self.system is not None:
            yield SystemSet(self.system)
        for name, value in self.preferences.items():
            yield PreferenceSet(name, value)
        for exchange in self.exchanges:
            yield exchange.asked
            if exchange.began:
                yield exchange.began
                if exchange.thoughts:
                    yield Thought(exchange.thinking)
                if exchange.pieces:
                    yield AnswerWent(exchange.answer)
                if exchange.ended:
                    yield exchange.ended


def new_conversation(model: str) -> Conversation:
    """An empty one. `model` is what finds the model again: a name of the catalogue, or an absolute path."""
    return Conversation(Began(FORMAT, secrets.token_hex(8), model, now(), __version__), model)


def now() -> str:
    """This moment in UTC, ISO 8601, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
