"""What happens in a conversation, one event at a time, and how an event is written on one line of JSON.

A conversation is the fold of its events (`conversation.py`), so what is saved is what happened: nothing is ever
rewritten, and a file that ends anywhere still holds everything before.

While an answer streams, its pieces (`AnswerBegan`, `Thought`, `AnswerWent`, `WasThinking`) go to a journal of their
own. The conversation's file gets one line for the whole answer, `Answered`, when it ends. Files of formats 1 and 2 hold
the pieces themselves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from llmrun.cli.chatting.preferences import Value, checked_value
from llmrun.errors import UsageError
from llmrun.types import FinishReason

FORMAT: Final = 3  # of the file; a change that older versions cannot read raises it
READABLE: Final = (1, 2, 3)  # 1 has no thoughts; 1 and 2 have a line for each token and a seed for every answer
FAILED: Final = "failed"  # an answer that an error ended

Name = str  # may hold a path that is not UTF-8: "\\udcff" stands for its byte 0xff, here and in the file

_REASONS = frozenset([*FinishReason, FAILED])


@dataclass(frozen=True, slots=True)
class Began:
    """First, and only once. `conversation` stays the same in every copy; `created` is UTC, ISO 8601."""

    format: int
    conversation: str
    model: Name
    created: str
    version: str


@dataclass(frozen=True, slots=True)
class ModelChanged:
    model: Name


@dataclass(frozen=True, slots=True)
class SystemSet:
    """None: the template's own, if it has one. An empty text replaces that one too."""

    text: str | None


@dataclass(frozen=True, slots=True)
class PreferenceSet:
    """None: back to what holds when nothing is said."""

    name: str
    value: Value | None


@dataclass(frozen=True, slots=True)
class QuestionAsked:
    """The user's turn, written down before the model sees it."""

    text: str
    time: str


@dataclass(frozen=True, slots=True)
class AnswerBegan:
    """The last question gets an answer; one that it has already is dropped. `seed` None: a server chose it."""

    seed: int | None


@dataclass(frozen=True, slots=True)
class AnswerWent:
    """The next piece of the answer, written down before it is shown."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """The next piece of what the model thinks, written down once the answer has begun."""

    text: str


@dataclass(frozen=True, slots=True)
class AnswerEnded:
    """`reason` is a FinishReason ("cancelled": the user stopped it) or "failed". Tokens and seconds as in Timings."""

    reason: str
    context_used: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    ttft_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class WasThinking:
    """The text of the answer so far was thinking."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The last question's whole answer, in place of an earlier one.

    thinking  None: the model did not think
    reason    as in AnswerEnded; None: the process died before the answer's end, and the numbers that follow are 0
    """

    text: str
    thinking: str | None
    seed: int | None
    reason: str | None
    context_used: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    ttft_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Undone:
    """The last question is taken back, and its answer if it has one."""


@dataclass(frozen=True, slots=True)
class Cleared:
    """All questions and answers are forgotten. Only files of formats 1 and 2 hold it: /clear begins a new file now."""


Event = (
    Began
    | ModelChanged
    | SystemSet
    | PreferenceSet
    | QuestionAsked
    | AnswerBegan
    | Thought
    | AnswerWent
    | AnswerEnded
    | WasThinking
    | Answered
    | Undone
    | Cleared
)
Piece = AnswerBegan | Thought | AnswerWent | WasThinking  # of an answer that streams

_KINDS: Mapping[str, type[Event]] = {
    "began": Began,
    "model": ModelChanged,
    "system": SystemSet,
    "set": PreferenceSet,
    "question": QuestionAsked,
    "answer": AnswerBegan,
    "thought": Thought,
    "text": AnswerWent,
    "end": AnswerEnded,
    "was-thinking": WasThinking,
    "answered": Answered,
    "undo": Undone,
    "clear": Cleared,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def to_line(event: Event) -> bytes:
    """One line of JSON in UTF-8, with its newline."""
    values = {field.name: getattr(event, field.name) for field in fields(event)}
    text = json.dumps({"event": _NAMES[type(event)], **values}, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def from_line(line: bytes) -> Event:
    """The event on a line. Raises ValueError, which says in a few words what is wrong, for anything but an event."""
    try:
        values = json.loads(line.decode("utf-8"), parse_constant=_refuse)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not JSON in UTF-8: {error}") from None
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    name = values.pop("event", None)
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"unknown event {name!r:.40}")
    wanted = {field.name: str(field.type) for field in fields(kind)}
    if values.keys() != wanted.keys():
        raise ValueError(f"{name}: keys {', '.join(map(repr, values))!s:.80}, not {', '.join(wanted)}")
    for key, value in values.items():
        if not _FITS[wanted[key]](value):
            raise ValueError(f"{name}: {key}: {value!r:.40} is not a {wanted[key].lower()}")
    return _meant(kind(**values))


def _meant(event: Event) -> Event:
    """The event, its values checked as far as one event alone allows."""
    if isinstance(event, PreferenceSet) and event.value is not None:
        try:
            return PreferenceSet(event.name, checked_value(event.name, event.value))
        except UsageError as error:
            raise ValueError(str(error)) from None
    unended = isinstance(event, Answered) and event.reason is None
    if isinstance(event, AnswerEnded | Answered) and event.reason not in _REASONS and not unended:
        raise ValueError(
            f"{_NAMES[type(event)]}: reason: {event.reason!r:.40} is none of {', '.join(sorted(_REASONS))}"
        )
    if isinstance(event, Began) and event.format not in READABLE:
        raise ValueError(f"began: format {event.format}: this llmrun reads format {FORMAT}")
    return event


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def _is_text(value: Any) -> bool:
    """Text that can be written again: JSON can spell half a surrogate pair, UTF-8 cannot."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**64


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _is_preference(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_text, value))
    return value is None or _is_text(value) or type(value) in (int, float, bool)


_FITS: Mapping[str, Callable[[Any], bool]] = {
    "str": _is_text,
    "Name": lambda value: isinstance(value, str),
    "str | None": lambda value: value is None or _is_text(value),
    "int": _is_count,
    "int | None": lambda value: value is None or _is_count(value),
    "float": _is_seconds,
    "Value | None": _is_preference,
}
