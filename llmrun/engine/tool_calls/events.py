"""What the parser of tool calls returns: pieces of the answer and of calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnswerText:
    """A piece of the answer that is not part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A tool call begins. `index` counts the calls of the answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsText:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call is complete, and its arguments are a valid JSON object."""

    index: int


@dataclass(frozen=True, slots=True)
class CallBroken:
    """The model began a call that is malformed or unfinished.

    text    everything that the model wrote from the beginning of the call to its end, or to where another text begins
    reason  what is wrong with it
    index   the index of the call if CallStarted was already returned for it, or None. This index is not used again.
    """

    text: str
    reason: str
    index: int | None


ToolEvent = AnswerText | CallStarted | ArgumentsText | CallEnded | CallBroken
