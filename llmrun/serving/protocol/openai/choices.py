"""Collects the answer of one choice of a chat completion, and returns the deltas to stream."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from llmrun.engine.requests import TextDelta, ToolCallDelta

_ID_LETTERS: Final = 24  # as in OpenAI's IDs

Delta = dict[str, Any]


@dataclass(slots=True)
class _Call:
    index: int  # among the calls that the client knows
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class ChatChoice:
    """The message of one choice so far.

    Text that may still turn out to be thinking is held back, because a client cannot take it back.
    """

    def __init__(self, known_ids: Iterable[str]) -> None:
        """Create an empty message. `known_ids` are those of earlier tool calls in the conversation."""
        self._answer: list[str] = []
        self._thoughts: list[str] = []
        self._held: list[str] = []
        self._calls: dict[int, _Call] = {}  # by the engine's index
        self._ids = set(known_ids)

    def take(self, delta: TextDelta) -> list[Delta]:
        """Add the next piece of the answer, and return what to send, in order."""
        thought = delta.reasoning
        if delta.unopened:
            thought = "".join(self._held) + thought
            self._held = []
        deltas = []
        if thought:
            self._thoughts.append(thought)
            deltas.append({"reasoning_content": thought})
        self._held.append(delta.text)
        if not delta.tentative:
            deltas += self.release()
        for piece in delta.tool_calls:
            deltas += self._take_call(piece)
        return deltas

    def release(self) -> list[Delta]:
        """Return the text that was held back. Called when it is certain to be part of the answer, or at its end."""
        text = "".join(self._held)
        self._held = []
        if not text:
            return []
        self._answer.append(text)
        return [{"content": text}]

    def message(self) -> dict[str, Any]:
        """Return the complete message."""
        content = "".join(self._answer)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = [
                _written_call(call.id, call.name, "".join(call.arguments)) for call in self._calls.values()
            ]
        return message

    def _take_call(self, piece: ToolCallDelta) -> list[Delta]:
        """Add a piece of a tool call. A call that is cut off keeps its incomplete arguments, as in OpenAI's API."""
        call = self._calls.get(piece.index)
        if call is None:
            call = _Call(len(self._calls), self._unused_id(piece.id), piece.name, [piece.arguments])
            self._calls[piece.index] = call
            return [{"tool_calls": [{"index": call.index, **_written_call(call.id, call.name, piece.arguments)}]}]
        if not piece.arguments:
            return []
        call.arguments.append(piece.arguments)
        return [{"tool_calls": [{"index": call.index, "function": {"arguments": piece.arguments}}]}]

    def _unused_id(self, given: str) -> str:
        """Return this ID of a call, or another one if an earlier call has it.

        The engine's IDs are kept where possible. They are the same for the same seed, and some templates write them
        into the prompt, where another ID would keep the next request from reusing the cached prefix.
        """
        found = given
        for number in itertools.count():
            if found and found not in self._ids:
                break
            letters = hashlib.sha256(f"{given} {len(self._ids)} {number}".encode()).hexdigest()
            found = f"call_{letters[:_ID_LETTERS]}"
        self._ids.add(found)
        return found


def _written_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
