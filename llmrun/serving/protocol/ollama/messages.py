"""Converts the messages of Ollama's API into the form of chat completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmrun.serving.protocol.errors import InvalidField, unsupported
from llmrun.serving.protocol.fields import Fields, seen
from llmrun.serving.protocol.openai.messages import read_messages


def read_ollama_messages(fields: Fields) -> tuple[Sequence[Mapping[str, Any]], tuple[str, ...]]:
    """Return the conversation of a ChatPrompt, and the places of fields without effect. Raises InvalidField.

    The conversation is empty if there are no messages.
    """
    given = fields.item_fields("messages")
    if not given:
        return (), ()
    calls = _Calls()
    converted = Fields({"messages": [_converted(message, calls) for message in given]})
    return read_messages(converted), converted.unread()


def refuse_images(fields: Fields) -> None:
    """Raise InvalidField if there are images."""
    if fields.items("images"):
        raise unsupported(fields.path("images"), "this server does not read images", hint="send text only")


def _converted(message: Fields, calls: _Calls) -> dict[str, Any]:
    """Return a message with the names that chat completions use. Fields that mean the same are left to their reader."""
    refuse_images(message)
    role = (message.text("role") or "").lower() or None
    content = message.value("content")
    found: dict[str, Any] = {"role": role, "content": "" if content is None else content}
    if role == "assistant":
        found["reasoning_content"] = message.text("thinking")
        found["tool_calls"] = [_converted_call(call, calls) for call in message.item_fields("tool_calls") or ()]
    elif role == "tool":
        found["name"] = message.text("tool_name")
        found["tool_call_id"] = calls.answered(message, found["name"])
    return {**found, **message.rest()}


def _converted_call(call: Fields, calls: _Calls) -> dict[str, Any]:
    call_id, function = call.text("id"), call.value("function")
    if isinstance(function, dict):
        function = {name: value for name, value in function.items() if name != "index"}
        call_id = calls.asked(call_id, function.get("name"))
    return {"id": call_id, "function": function, **call.rest()}


class _Calls:
    """The tool calls of a conversation so far that have no result yet.

    Ollama's clients drop the IDs of calls. A result then belongs to the first call of its tool, or to the first of all
    if it does not name a tool.
    """

    def __init__(self) -> None:
        self._open: dict[str, object] = {}  # the ID of a call -> the name of its tool
        self._asked = 0

    def asked(self, call_id: str | None, name: object) -> str:
        """Add a call, and return its ID."""
        self._asked += 1
        found = call_id or f"call_{self._asked}"
        self._open[found] = name
        return found

    def answered(self, result: Fields, name: str | None) -> str:
        """Return the ID of the call to which a result belongs. Raises InvalidField if there is none."""
        call_id = result.text("tool_call_id")
        if call_id is None:
            call_id = next((known for known, tool in self._open.items() if name in (None, tool)), None)
        if call_id is None:
            of_tool = "" if name is None else f" of {seen(name)}"
            raise InvalidField(result.place, f"there is no tool call{of_tool} before this result")
        self._open.pop(call_id, None)
        return call_id
