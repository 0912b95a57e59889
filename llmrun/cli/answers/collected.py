"""Collects the events of one answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from llmrun.engine.requests import TextDelta, TokenLogprobs, ToolCall, ToolCallDelta


@dataclass(slots=True)
class CollectedAnswer:
    """The text, thinking, log probabilities and token ids of an answer so far."""

    pieces: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def take(self, delta: TextDelta) -> None:
        """Add the next piece of the answer."""
        if delta.unopened:
            self.thoughts += self.pieces
            self.pieces = []
        self.thoughts.append(delta.reasoning)
        self.pieces.append(delta.text)
        self.logprobs += delta.logprobs
        self.tokens += delta.tokens

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def reasoning(self) -> str:
        return "".join(self.thoughts)


@dataclass(slots=True)
class CollectedCalls:
    """The tool calls of an answer so far.

    Some servers give several calls the same index, and some repeat the id and the name in every piece. Therefore, a
    piece with a name and another id begins a new call. A new id alone does not, because some servers send one with
    every piece.

    problem  why the most recently dropped call is not valid; "" if none was dropped
    """

    problem: str = ""
    _calls: dict[tuple[int, int], ToolCall] = field(default_factory=dict)  # by index and count of the calls with it
    _counts: dict[int, int] = field(default_factory=dict)  # the number of earlier calls with the same index

    def take(self, deltas: Iterable[ToolCallDelta]) -> None:
        """Add the next pieces of calls. A call with a problem is dropped."""
        for delta in deltas:
            self.problem = delta.problem or self.problem
            key = delta.index, self._counts.get(delta.index, 0)
            before = self._calls.get(key, ToolCall("", "", ""))
            if before.id and before.name and delta.id not in ("", before.id) and delta.name:
                self._counts[delta.index] = key[1] + 1
                key, before = (delta.index, key[1] + 1), ToolCall("", "", "")
            if delta.problem:
                self._calls.pop(key, None)
            else:
                name = before.name if delta.name == before.name else before.name + delta.name
                self._calls[key] = ToolCall(before.id or delta.id, name, before.arguments + delta.arguments)

    @property
    def calls(self) -> list[ToolCall]:
        """The calls in the order in which they began, without those that have no name.

        Calls get new ids where the server left them out or repeated one, because every result needs the id of its call.
        """
        ordered = [call for call in self._calls.values() if call.name]
        known = {""}
        numbers = itertools.count()
        for place, call in enumerate(ordered):
            if call.id in known:
                unused = next(name for name in (f"call_{number}" for number in numbers) if name not in known)
                ordered[place] = replace(call, id=unused)
            known.add(ordered[place].id)
        return ordered
