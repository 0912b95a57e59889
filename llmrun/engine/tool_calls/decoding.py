"""Separates the tool calls of one answer from its text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from llmrun.engine.requests import ToolCallDelta
from llmrun.engine.tool_calls.events import AnswerText, ArgumentsText, CallBroken, CallEnded, CallStarted, ToolEvent
from llmrun.engine.tool_calls.parser import ToolCallParser

if TYPE_CHECKING:
    from llmrun.engine.tool_calls.schemas import Tool
    from llmrun.engine.tool_calls.spelling import ToolSpelling


class CallDecoder:
    """An AnswerReader that finds tool calls.

    placeholders  maps the ids of control tokens to the characters that stand for them in the text
    complete      how many calls are complete
    """

    def __init__(self, spelling: ToolSpelling, tools: Sequence[Tool], seed: str) -> None:
        """Create a decoder. ToolCallParser describes the parameters."""
        self.placeholders: Mapping[int, str] = spelling.characters
        self.complete = 0
        self._parser = ToolCallParser(spelling, tools, seed)

    def feed(self, text: str) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """Add text with placeholders, and return the text that belongs to no call, and the pieces of calls."""
        return self._read(self._parser.feed(text))

    def finish(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """End the answer, and return what was held back, as `feed` does."""
        return self._read(self._parser.finish())

    def _read(self, events: Sequence[ToolEvent]) -> tuple[str, tuple[ToolCallDelta, ...]]:
        self.complete += sum(isinstance(event, CallEnded) for event in events)
        return "".join(_texts(events)), tuple(_deltas(events))


def _texts(events: Iterable[ToolEvent]) -> Iterator[str]:
    """Yield the texts of the answer. A call that is broken before its name is complete is text, too."""
    for event in events:
        if isinstance(event, AnswerText) or (isinstance(event, CallBroken) and event.index is None):
            yield event.text


def _deltas(events: Iterable[ToolEvent]) -> Iterator[ToolCallDelta]:
    for event in events:
        if isinstance(event, CallStarted):
            yield ToolCallDelta(event.index, event.id, event.name)
        elif isinstance(event, ArgumentsText):
            yield ToolCallDelta(event.index, arguments=event.text)
        elif isinstance(event, CallBroken) and event.index is not None:
            yield ToolCallDelta(event.index, problem=event.reason)
