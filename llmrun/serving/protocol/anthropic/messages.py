"""Reads the system prompt and the messages of Anthropic's API, and converts them to the form of chat completions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, Final

from llmrun.serving.protocol.errors import InvalidField, unsupported
from llmrun.serving.protocol.fields import Fields, missing, seen
from llmrun.serving.protocol.openai.messages import BETWEEN_PARTS

ROLES: Final = ("user", "assistant", "system")
# Claude Code begins its system prompt with this line for Anthropic's accounting. It may differ in every request,
# and then no request could reuse a cached prefix.
BILLING: Final = "x-anthropic-billing-header"
_BILLING: Final = re.compile(rf"{BILLING}:(?:\s*\w+=[^;\n]*;)*\s*")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a ChatPrompt. `ignored` has the names of parts of the system prompt that were left out."""

    messages: tuple[Mapping[str, Any], ...]
    ignored: tuple[str, ...]

    @property
    def continues(self) -> bool:
        """Whether the last message is the beginning of the answer, which the model continues."""
        return bool(self.messages[-1]["role"] == "assistant")


def read_conversation(fields: Fields) -> Conversation:
    """Read `system` and `messages`. Raises InvalidField.

    Consecutive messages of the same role become one, as in Anthropic's API. The results of tools become messages of
    their own. Many templates allow a system message only at the beginning, so later ones become part of a user message,
    in the tags that Claude Code uses for such reminders.
    """
    given = fields.item_fields("messages")
    if given is None:
        raise missing("messages")
    if not given:
        raise InvalidField("messages", "expected at least one message, got an empty list")
    system = _read_texts(fields, "system")
    kept = [text for text in map(_without_billing, system) if text]
    first = [{"role": "system", "content": BETWEEN_PARTS.join(kept)}] if kept else []
    read = chain.from_iterable(map(_read_message, given))
    found = tuple(_merged(_reminding(chain(first, read))))
    if found[-1].get("tool_calls"):
        raise InvalidField("messages", "the last message calls tools, but their results are missing")
    return Conversation(found, (BILLING,) if any(map(_BILLING.match, system)) else ())


def _without_billing(text: str) -> str:
    return _BILLING.sub("", text, count=1) if _BILLING.match(text) else text


def _reminding(messages: Iterable[Message]) -> Iterator[Message]:
    """Yield the messages, with parts of the user's in place of system messages that are not at the beginning."""
    is_begun = False
    for message in messages:
        if message["role"] != "system":
            is_begun = True
        elif is_begun:
            message = {"role": "user", "content": f"<system-reminder>\n{message['content']}\n</system-reminder>"}
        yield message


def _merged(messages: Iterable[Message]) -> Iterator[Message]:
    """Yield the messages, with one in place of consecutive ones of the same role."""
    for role, group in groupby(messages, itemgetter("role")):
        if role == "tool":
            yield from group
        else:
            yield _one(list(group))


def _one(messages: Sequence[Message]) -> Message:
    merged = dict(messages[0])
    for name in ("content", "reasoning_content"):
        if texts := [message[name] for message in messages if message.get(name)]:
            merged[name] = BETWEEN_PARTS.join(texts)
    if calls := [call for message in messages for call in message.get("tool_calls", ())]:
        merged["tool_calls"] = calls
    return merged


def _read_message(message: Fields) -> Iterable[Message]:
    role = message.word("role", ROLES)
    if role is None:
        raise missing(message.path("role"))
    if message.peek("content") is None:
        raise missing(message.path("content"))
    if role == "assistant":
        return [_read_answer(message)]
    if role == "system":
        return [{"role": role, "content": BETWEEN_PARTS.join(_read_texts(message, "content"))}]
    return _read_question(message)


def _read_question(message: Fields) -> list[Message]:
    """Return the results of tools in a user message, and then its text."""
    texts, results = [], []
    for block in _blocks(message, "content"):
        if isinstance(block, Fields) and _kind_of(block) == "tool_result":
            results.append(_read_result(block))
        else:
            texts.append(_read_text(block))
    if results and not texts:
        return results
    return [*results, {"role": "user", "content": BETWEEN_PARTS.join(texts)}]


def _read_result(block: Fields) -> Message:
    text = BETWEEN_PARTS.join(_read_texts(block, "content"))
    # Chat templates have no field for errors.
    if block.boolean("is_error") and not text.lower().startswith("error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": block.needed_text("tool_use_id"), "content": text}


def _read_answer(message: Fields) -> Message:
    texts, thoughts, calls = [], [], []
    for block in _blocks(message, "content"):
        kind = _kind_of(block) if isinstance(block, Fields) else "text"
        if isinstance(block, Fields) and kind == "thinking":
            thoughts.append(block.needed_text("thinking"))
            block.text("signature")
        elif isinstance(block, Fields) and kind == "tool_use":
            calls.append(_read_call(block))
        elif kind != "redacted_thinking":  # encrypted; only Anthropic can read it
            texts.append(_read_text(block))
    found: Message = {"role": "assistant", "content": BETWEEN_PARTS.join(texts)}
    if any(thoughts):
        found["reasoning_content"] = BETWEEN_PARTS.join(thoughts)
    if calls:
        found["tool_calls"] = calls
    return found


def _read_call(block: Fields) -> Message:
    name, arguments = block.needed_text("name"), block.object("input")
    if not name:
        raise InvalidField(block.path("name"), "empty")
    if arguments is None:
        raise missing(block.path("input"))
    return {
        "id": block.needed_text("id"),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _read_texts(fields: Fields, name: str) -> list[str]:
    """Return the texts of a field that is missing, a string, or a list of blocks of text."""
    return [*map(_read_text, _blocks(fields, name))]


def _blocks(fields: Fields, name: str) -> list[str | Fields]:
    value = fields.value(name)
    if value is None or type(value) is str:
        return [] if value is None else [value]
    if type(value) is not list:
        raise fields.wrong(name, "a string or a list of blocks")
    return [*(fields.item_fields(name) or ())]


def _kind_of(block: Fields) -> str:
    block.value("cache_control")  # prefixes are cached anyway
    kind = block.text("type")
    if kind is None:
        raise missing(block.path("type"))
    return kind


def _read_text(block: str | Fields) -> str:
    if isinstance(block, str):
        return block
    if (kind := _kind_of(block)) != "text":
        raise unsupported(block.place, f"blocks of the type {seen(kind)} are not supported here", hint="send text")
    return block.needed_text("text")
