"""Reads the messages of a conversation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from llmrun.serving.protocol.errors import InvalidField, unsupported
from llmrun.serving.protocol.fields import Fields, missing, seen

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS: Final = ("text", "input_text", "output_text")  # the last two are the Responses API's names
_REFUSAL: Final = "refusal"
BETWEEN_PARTS: Final = "\n"  # as in llama.cpp and vLLM


def read_messages(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """Return the conversation of a ChatPrompt, with content as text. Raises InvalidField."""
    messages = fields.item_fields("messages")
    if messages is None:
        raise missing("messages")
    if not messages:
        raise InvalidField("messages", "expected at least one message, got an empty list")
    return tuple(map(read_message, messages))


def call_ids(messages: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Return the IDs of all tool calls in these messages."""
    calls = (call for message in messages for call in message.get("tool_calls") or ())
    return frozenset(call["id"] for call in calls if "id" in call)


def read_message(message: Fields) -> dict[str, Any]:
    """Return a message of a ChatPrompt, with content as text. Raises InvalidField."""
    if message.peek("role") == "function":
        raise unsupported(message.path("role"), "this role is obsolete", hint="send results with the role tool")
    role = message.word("role", ROLES)
    if role is None:
        raise missing(message.path("role"))
    for name, advice in (("function_call", "send `tool_calls` instead"), ("audio", "send text instead")):
        if message.value(name) is not None:
            raise unsupported(message.path(name), hint=advice)
    # Few templates know the newer role.
    found: dict[str, Any] = {"role": "system" if role == "developer" else role}
    if role == "assistant":
        found |= _read_answer(message)
    else:
        content = read_content(message, "content")
        if content is None and role != "tool":
            raise missing(message.path("content"))
        found["content"] = content or ""
    for name in ("name", "tool_call_id") if role == "tool" else ("name",):
        if (value := message.text(name)) is not None:
            found[name] = value
    return found


def _read_answer(message: Fields) -> Mapping[str, Any]:
    """Read the fields that only past answers have."""
    content = read_content(message, "content", (*_TEXT_PARTS, _REFUSAL))
    refusal = message.text(_REFUSAL)
    found: dict[str, Any] = {"content": content or refusal or ""}
    calls = message.item_fields("tool_calls")
    if calls:
        found["tool_calls"] = [*map(_read_call, calls)]
    leave_empty(message, "annotations")  # part of every answer of OpenAI's API
    reasoning = [message.text(name) for name in ("reasoning_content", "reasoning")]
    text = next((text for text in reasoning if text is not None), None)
    if text is not None:
        found["reasoning_content"] = text
    return found


def read_content(message: Fields, name: str, kinds: tuple[str, ...] = _TEXT_PARTS) -> str | None:
    """Return a field that is a string or a list of parts as text, or None if there is none. Raises InvalidField."""
    content = message.value(name)
    if content is None or type(content) is str:
        return content
    if type(content) is not list:
        raise message.wrong(name, "a string or a list of parts")
    parts = message.item_fields(name) or ()
    return BETWEEN_PARTS.join(_read_part(part, kinds) for part in parts)


def _read_part(part: Fields, kinds: tuple[str, ...]) -> str:
    kind = part.text("type")
    if kind is None:
        raise missing(part.path("type"))
    if kind not in kinds:
        raise unsupported(part.place, f"parts of the type {seen(kind)} are not supported", hint="send text only")
    leave_empty(part, "annotations")  # part of every answer of the Responses API
    leave_empty(part, "logprobs")
    return part.needed_text(_REFUSAL if kind == _REFUSAL else "text")


def leave_empty(fields: Fields, name: str) -> None:
    """Mark a field as read if it is an empty list."""
    if fields.peek(name) == []:
        fields.value(name)


def _read_call(call: Fields) -> dict[str, Any]:
    if call.peek("type") not in (None, "function"):
        raise unsupported(call.path("type"), "only calls of functions are supported")
    call.value("type")
    function = call.fields("function")
    if function is None:
        raise missing(call.path("function"))
    name, arguments = function.needed_text("name"), function.value("arguments")
    if not name:
        raise InvalidField(function.path("name"), "empty")
    if arguments is not None and type(arguments) not in (str, dict):
        raise function.wrong("arguments", "a JSON object as a string")
    call_id = call.text("id")
    found = {"type": "function", "function": {"name": name, "arguments": arguments or "{}"}}
    return found if call_id is None else {"id": call_id, **found}
