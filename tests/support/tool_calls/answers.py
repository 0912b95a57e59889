"""Parses whole answers with the parser of tool calls, and joins the pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from llmrun.engine.tool_calls.parser import (
    AnswerText,
    ArgumentsText,
    CallBroken,
    CallEnded,
    CallStarted,
    ToolCallParser,
    ToolEvent,
)
from llmrun.engine.tool_calls.schemas import Tool
from tests.support.tool_calls.formats import Case


@dataclass
class ParsedCall:
    id: str
    name: str
    arguments: str = ""
    ended: bool = False


@dataclass
class Parsed:
    """Everything that a parser returned for one answer. `order` is the order of texts, calls and broken calls."""

    text: str = ""
    calls: list[ParsedCall] = field(default_factory=list)
    broken: list[CallBroken] = field(default_factory=list)
    order: list[str] = field(default_factory=list)

    def add(self, events: Iterable[ToolEvent]) -> None:
        for event in events:
            if isinstance(event, AnswerText):
                self.text += event.text
                if self.order[-1:] != ["text"]:
                    self.order.append("text")
            elif isinstance(event, CallStarted):
                assert event.index == len(self.calls)
                self.calls.append(ParsedCall(event.id, event.name))
                self.order.append("call")
            elif isinstance(event, ArgumentsText):
                self.calls[event.index].arguments += event.text
            elif isinstance(event, CallEnded):
                self.calls[event.index].ended = True
            else:
                self.broken.append(event)
                self.order.append("broken")


def parsed(case: Case, tools: Sequence[Tool], text: str, sizes: Sequence[int] = ()) -> Parsed:
    """Parse an answer. `sizes` are the lengths of its chunks, repeated as needed; () means one chunk."""
    parser = ToolCallParser(case.spelling, tools)
    found = Parsed()
    at = turn = 0
    while at < len(text):
        size = sizes[turn % len(sizes)] if sizes else len(text)
        found.add(parser.feed(text[at : at + size]))
        at, turn = at + size, turn + 1
    found.add(parser.finish())
    return found
