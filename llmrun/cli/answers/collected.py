"""Collects the events of one answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from llmrun.engine.requests import TextDelta, TokenLogprobs, ToolCall, ToolCallDelta


@dataclass(slots=True)
class CollectedAnswer:
    """The text, thinking and log probabilities of an answer so far."""

    pieces: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def take(self, delta: TextDelta) -> None:
        """Add the next piece of the answer."""
        if delta.unopened:
            self.thoughts += self.pieces
            self.pieces = []
        self.thoughts.append(delta.reasoning)
        self.pieces.append(delta.text)
        self.logprobs += delta.logprobs

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def reasoning(self) -> str:
        return "".join(self.thoughts)


@dataclass(slots=True)
class CollectedCalls:
    """The tool calls of an answer so far, by index.

    problem  why the most recently dropped call is not valid; "" if none was dropped
    """

    problem: str = ""
    _calls: dict[int, ToolCall] = field(default_factory=dict)

    def take(self, deltas: Iterable[ToolCallDelta]) -> None:
        """Add the next pieces of calls. A call with a problem is dropped."""
        for delta in deltas:
            self.problem = delta.problem or self.problem
            before = self._calls.get(delta.index, ToolCall("", "", ""))
            if delta.problem:
                self._calls.pop(delta.index, None)
            else:
                self._calls[delta.index] = ToolCall(
                    before.id + delta.id, before.name + delta.name, before.arguments + delta.arguments
                )

    @property
    def calls(self) -> list[ToolCall]:
        """The calls in order, without those that have no name.

        Calls get new ids where the server left them out or repeated one, because every result needs the id of its call.
        """
        ordered = [call for _, call in sorted(self._calls.items()) if call.name]
        known = {""}
        numbers = itertools.count()
        for place, call in enumerate(ordered):
            if call.id in known:
                unused = next(name for name in (f"call_{number}" for number in numbers) if name not in known)
                ordered[place] = replace(call, id=unused)
            known.add(ordered[place].id)
        return ordered
