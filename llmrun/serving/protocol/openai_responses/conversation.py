"""Reads the conversation of a response, whose items become the messages of a ChatPrompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from llmrun.engine.requests import ToolCall
from llmrun.serving.protocol.errors import InvalidField, unsupported
from llmrun.serving.protocol.fields import Fields, missing, seen
from llmrun.serving.protocol.openai.messages import leave_empty, read_content, read_message

ROLES: Final = ("system", "developer", "user", "assistant")
_MESSAGE: Final = "message"
_THINKING: Final = "reasoning_content"
_TEXTS: Final = ("content", _THINKING)
_BETWEEN_SYSTEM_MESSAGES: Final = "\n\n"
_QUIET: Final = ("type", "id", "status")  # fields without meaning here, which items of past answers have


def read_conversation(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """Return the messages of `instructions` and `input`. Raises InvalidField."""
    conversation = _Conversation()
    instructions, given = fields.text("instructions"), fields.value("input")
    if instructions:
        conversation.add({"role": "system", "content": instructions})
    if given is None:
        raise missing("input")
    if type(given) is str:
        conversation.add({"role": "user", "content": given})
    elif type(given) is list:
        for item in fields.item_fields("input") or ():
            _add_item(conversation, item)
    else:
        raise fields.wrong("input", "a string or a list of items")
    if len(conversation.messages) == bool(instructions):
        raise InvalidField("input", f"expected at least one message, got {seen(given)}")
    return conversation.joined()


class _Conversation:
    """The messages so far.

    An answer of the Responses API is several items: its thinking, its text, and its calls. In a chat, they are one
    message. Texts that can grow are lists of parts until the end, because adding to a long text again and again takes
    quadratic time.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add(self, message: dict[str, Any]) -> None:
        """Add a message. System messages at the beginning become one, because many templates allow only one."""
        begins = len(self.messages) == 1 and self.messages[0]["role"] == message["role"] == "system"
        if begins:
            self.messages[0]["content"] += (_BETWEEN_SYSTEM_MESSAGES, message["content"])
        elif message["role"] == "system" and not self.messages:
            self.messages.append({**message, "content": [message["content"]]})
        else:
            self.messages.append(message)

    def add_thinking(self, text: str) -> None:
        """Add thinking, which begins an answer."""
        answer = self._answer()
        if answer["content"] or "tool_calls" in answer:
            answer = self._new_answer()
        answer.setdefault(_THINKING, []).append(text)

    def add_answer(self, message: dict[str, Any]) -> None:
        """Add the text of an answer. Text after a call belongs to the same answer, but text after text does not."""
        answer = self._answer()
        if answer["content"] and "tool_calls" not in answer:
            answer = self._new_answer()
        if message["content"]:
            answer["content"].append(message["content"])
        thinking = {_THINKING: [message[_THINKING]]} if _THINKING in message else {}
        answer.update({**message, **thinking, "content": answer["content"]})

    def add_call(self, call: ToolCall) -> None:
        """Add a call to the answer."""
        self._answer().setdefault("tool_calls", []).append(call.as_message())

    def joined(self) -> tuple[Mapping[str, Any], ...]:
        """Return the messages with whole texts."""
        return tuple(map(_joined, self.messages))

    def _answer(self) -> dict[str, Any]:
        """Return the last message if it is an answer, or else a new one."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            return self.messages[-1]
        return self._new_answer()

    def _new_answer(self) -> dict[str, Any]:
        self.messages.append({"role": "assistant", "content": []})
        return self.messages[-1]


def _joined(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, **{name: "".join(message[name]) for name in _TEXTS if type(message.get(name)) is list}}


def _add_item(conversation: _Conversation, item: Fields) -> None:
    kind = item.text("type") or _MESSAGE
    if kind not in _ITEMS:
        hint = "send the item itself" if kind == "item_reference" else f"supported are {', '.join(_ITEMS)}"
        raise unsupported(item.path("type"), f"items of the type {seen(kind)} are not supported", hint=hint)
    for name in _QUIET:
        item.value(name)
    _ITEMS[kind](conversation, item)


def _add_message(conversation: _Conversation, item: Fields) -> None:
    item.word("role", ROLES)
    message = read_message(item)
    (conversation.add_answer if message["role"] == "assistant" else conversation.add)(message)


def _add_reasoning(conversation: _Conversation, item: Fields) -> None:
    """Add thinking. A summary and encrypted thinking, which only other servers write, have no effect."""
    leave_empty(item, "summary")
    text = read_content(item, "content", ("reasoning_text",))
    if text:
        conversation.add_thinking(text)


def _add_call(conversation: _Conversation, item: Fields) -> None:
    name, arguments = item.needed_text("name"), item.needed_text("arguments")
    if not name:
        raise InvalidField(item.path("name"), "empty")
    conversation.add_call(ToolCall(item.needed_text("call_id"), name, arguments or "{}"))


def _add_output(conversation: _Conversation, item: Fields) -> None:
    call_id, output = item.needed_text("call_id"), read_content(item, "output")
    if output is None:
        raise missing(item.path("output"))
    conversation.add({"role": "tool", "content": output, "tool_call_id": call_id})


_ITEMS: Final[Mapping[str, Callable[[_Conversation, Fields], None]]] = {
    _MESSAGE: _add_message,
    "reasoning": _add_reasoning,
    "function_call": _add_call,
    "function_call_output": _add_output,
}
ITEM_TYPES: Final = tuple(_ITEMS)
