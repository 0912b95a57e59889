"""Writes the content of a message: its blocks, and the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

# A signature proves to Anthropic's servers that one of their models wrote the thinking. No proof is needed here, but
# some clients drop blocks without a signature.
SIGNATURE: Final = "unsigned"

Event = dict[str, Any]


class _Form(NamedTuple):
    """How the text of a block is written: its field in the block, the type of its deltas, and its field in them."""

    field: str
    delta: str
    delta_field: str


_FORMS: Final[Mapping[str, _Form]] = {
    "thinking": _Form("thinking", "thinking_delta", "thinking"),
    "text": _Form("text", "text_delta", "text"),
    "tool_use": _Form("input", "input_json_delta", "partial_json"),
}


@dataclass(slots=True)
class _Block:
    """A block of content. `head` has everything but the text."""

    head: dict[str, Any]
    texts: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return str(self.head["type"])

    @property
    def whole(self) -> dict[str, Any]:
        """The block with the text so far."""
        text = "".join(self.texts)
        if self.kind == "tool_use":
            return {**self.head, "input": _parsed(text)}
        return {**self.head, _FORMS[self.kind].field: text}


class ContentBlocks:
    """The blocks of one message, made from the deltas of a chat completion, in the order in which the model wrote them.

    One block is open at a time, because the model writes one call after the other.
    """

    def __init__(self, *, shows_thinking: bool) -> None:
        """Create a message without content. Unless `shows_thinking` is set, blocks of thinking have no text."""
        self._shows_thinking = shows_thinking
        self._blocks: list[_Block] = []
        self._calls: list[int] = []  # the numbers of the blocks of calls
        self._is_open = False

    def add(self, deltas: Iterable[Mapping[str, Any]]) -> list[Event]:
        """Add deltas, and return the events to stream."""
        return [event for delta in deltas for event in self._add(delta)]

    def close(self) -> list[Event]:
        """End the block that is open, and return its last events."""
        if not self._is_open:
            return []
        self._is_open = False
        last, signed = len(self._blocks) - 1, []
        if self._blocks[last].kind == "thinking":
            self._blocks[last].head["signature"] = SIGNATURE
            signed = [_delta(last, {"type": "signature_delta", "signature": SIGNATURE})]
        return [*signed, _event("content_block_stop", last)]

    def whole(self) -> list[dict[str, Any]]:
        """Return the complete content."""
        return [block.whole for block in self._blocks]

    def _add(self, delta: Mapping[str, Any]) -> list[Event]:
        if thought := delta.get("reasoning_content"):
            return self._text("thinking", thought if self._shows_thinking else "")
        if text := delta.get("content"):
            return self._text("text", text)
        events: list[Event] = []
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                events += self._begin({"type": "tool_use", "id": call["id"], "name": call["function"]["name"]})
                self._calls.append(len(self._blocks) - 1)
            events += self._piece(self._calls[call["index"]], call["function"]["arguments"])
        return events

    def _text(self, kind: str, text: str) -> list[Event]:
        """Add text to the open block if it is of this kind, or else to a new one."""
        continues = self._is_open and self._blocks[-1].kind == kind
        unsigned = {"signature": ""} if kind == "thinking" else {}
        events = [] if continues else self._begin({"type": kind, **unsigned})
        return [*events, *self._piece(len(self._blocks) - 1, text)]

    def _begin(self, head: dict[str, Any]) -> list[Event]:
        events = self.close()
        block = _Block(head)
        self._blocks.append(block)
        self._is_open = True
        return [*events, _event("content_block_start", len(self._blocks) - 1, content_block=block.whole)]

    def _piece(self, number: int, text: str) -> list[Event]:
        if not text:
            return []
        block = self._blocks[number]
        block.texts.append(text)
        form = _FORMS[block.kind]
        return [_delta(number, {"type": form.delta, form.delta_field: text})]


def _event(kind: str, number: int, **fields: Any) -> Event:
    return {"type": kind, "index": number, **fields}


def _delta(number: int, delta: Mapping[str, Any]) -> Event:
    return _event("content_block_delta", number, delta=delta)


def _parsed(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object. It is empty if they are incomplete or invalid.

    Incomplete arguments could do harm, such as the first half of a shell command.
    """
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
