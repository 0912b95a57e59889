"""Parses whole answers with the parser of tool calls, and joins the pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from llmrun.engine.requests import ToolCallDelta
from llmrun.engine.tool_calls.parser import CallDecoder
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
    """Everything that a decoder returned for one answer. `order` is the order of texts, calls and broken calls.

    broken  the last deltas of calls that are not valid
    """

    text: str = ""
    calls: list[ParsedCall] = field(default_factory=list)
    broken: list[ToolCallDelta] = field(default_factory=list)
    order: list[str] = field(default_factory=list)

    def add(self, found: Iterable[str | ToolCallDelta], complete: int) -> None:
        """Add what a decoder returned. `complete` is how many calls are complete."""
        for each in found:
            if isinstance(each, str):
                self.text += each
                if self.order[-1:] != ["text"]:
                    self.order.append("text")
            elif each.problem:
                self.broken.append(each)
                self.order.append("broken")
            elif each.name:
                assert each.index == len(self.calls)
                self.calls.append(ParsedCall(each.id, each.name))
                self.order.append("call")
            else:
                self.calls[each.index].arguments += each.arguments
        invalid = {each.index for each in self.broken}
        valid = [call for index, call in enumerate(self.calls) if index not in invalid]
        for call in valid[:complete]:
            call.ended = True


def parsed(case: Case, tools: Sequence[Tool], text: str, sizes: Sequence[int] = ()) -> Parsed:
    """Parse an answer. `sizes` are the lengths of its chunks, repeated as needed; () means one chunk."""
    decoder = CallDecoder(case.spelling, tools)
    found = Parsed()
    at = turn = 0
    while at < len(text):
        size = sizes[turn % len(sizes)] if sizes else len(text)
        found.add(decoder.feed(text[at : at + size]), decoder.complete)
        at, turn = at + size, turn + 1
    found.add(decoder.finish(), decoder.complete)
    return found
