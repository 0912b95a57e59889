"""Converts the body of a call of the Responses API into a request for the engine.

The items of the conversation become the messages of a ChatPrompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from llmrun.engine.requests import AUTO, ModelFacts, Request, ToolCall
from llmrun.serving.protocol.errors import InvalidField, unsupported
from llmrun.serving.protocol.fields import Fields, needed, read_strings, seen
from llmrun.serving.protocol.openai.messages import ToolOptions, leave_empty, read_content, read_message, read_tools
from llmrun.serving.protocol.openai.options import (
    MOST_LOGPROBS,
    Options,
    leave_obfuscation,
    leave_quiet,
    read_adapters,
    read_sampling,
    read_seed,
    read_stop,
    read_text_format,
    read_thinking,
    refuse_values,
    require_chats,
)
from llmrun.serving.protocol.openai.requests import chat_request
from llmrun.serving.protocol.parsed import Parsed

ROLES: Final = ("system", "developer", "user", "assistant")
_MESSAGE: Final = "message"
_THINKING: Final = "reasoning_content"
_TEXTS: Final = ("content", _THINKING)
_BETWEEN_SYSTEM_MESSAGES: Final = "\n\n"
_QUIET: Final = ("type", "id", "status")  # ignored fields of the items of past answers


def read_conversation(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """Return the messages of `instructions` and `input`. Raises InvalidField."""
    conversation = _Conversation()
    instructions, given = fields.text("instructions"), needed(fields, "input", fields.value("input"))
    if instructions:
        conversation.add({"role": "system", "content": instructions})
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
    """The messages of a conversation so far.

    An answer of the Responses API consists of several items: thinking, text, and tool calls. In a chat, these items
    form one message. Texts that can still grow are stored as lists of parts, because appending to a long string
    repeatedly takes quadratic time.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add(self, message: dict[str, Any]) -> None:
        """Add a message. System messages at the beginning are merged, because many templates allow only one."""
        begins = len(self.messages) == 1 and self.messages[0]["role"] == message["role"] == "system"
        if begins:
            self.messages[0]["content"] += (_BETWEEN_SYSTEM_MESSAGES, message["content"])
        elif message["role"] == "system" and not self.messages:
            self.messages.append({**message, "content": [message["content"]]})
        else:
            self.messages.append(message)

    def add_thinking(self, text: str) -> None:
        """Add thinking, which always begins a new answer."""
        answer = self._answer()
        if answer["content"] or "tool_calls" in answer:
            answer = self._new_answer()
        answer.setdefault(_THINKING, []).append(text)

    def add_answer(self, message: dict[str, Any]) -> None:
        """Add the text of an answer. Text after text begins a new answer, unless a tool call is in between."""
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
        """Return the messages with joined texts."""
        return tuple(map(_joined, self.messages))

    def _answer(self) -> dict[str, Any]:
        """Return the last message if it is an answer, and otherwise add and return a new answer."""
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
    """Add thinking. Summaries and encrypted thinking, which only other servers write, are ignored."""
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
    call_id, output = item.needed_text("call_id"), needed(item, "output", read_content(item, "output"))
    conversation.add({"role": "tool", "content": output, "tool_call_id": call_id})


_ITEMS: Final[Mapping[str, Callable[[_Conversation, Fields], None]]] = {
    _MESSAGE: _add_message,
    "reasoning": _add_reasoning,
    "function_call": _add_call,
    "function_call_output": _add_output,
}
ITEM_TYPES: Final = tuple(_ITEMS)


LOGPROBS: Final = "message.output_text.logprobs"
_STATELESS: Final = "this server stores no responses: send the whole conversation in `input`"
_TO_LIMIT: Final = "use `max_output_tokens`"
_ONE: Final = "send several requests with different seeds"
# Maps unsupported fields that would change the answer to accepted values and advice. The fields from `messages` onward
# belong to chat completions and would have no effect here.
REFUSED_IN_RESPONSES: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "min_tokens": ((0,), "ban the end tokens with `ignore_eos`, and set `max_output_tokens`"),
    "use_beam_search": ((False,), _ONE),
    "previous_response_id": ((), _STATELESS),
    "conversation": ((), _STATELESS),
    "store": ((False,), _STATELESS),
    "background": ((False,), "this server stores no responses: use `stream` to get the answer while it is generated"),
    "prompt": ((), "send the text of the prompt in `instructions` and `input`"),
    "truncation": (("disabled",), "this server never truncates conversations: leave out old items"),
    "context_management": (([],), "this server never truncates conversations: leave out old items"),
    "moderation": ((), ""),
    "messages": ((), "use `input`"),
    "response_format": ((), "use `text.format`"),
    "reasoning_effort": ((), "use `reasoning.effort`"),
    "max_tokens": ((), _TO_LIMIT),
    "max_completion_tokens": ((), _TO_LIMIT),
    "n_predict": ((), _TO_LIMIT),
    "n": ((1,), _ONE),
}
_REFUSED_IN_TEXT: Final = {"verbosity": (("medium",), "ask for a short or a long answer in `instructions`")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedResponse(Parsed):
    """A parsed call, which consists of a single request.

    settings  the settings that the answer repeats, with defaults for missing fields
    """

    settings: Mapping[str, Any]


def parse_response(body: dict[str, Any], facts: ModelFacts, seed: int) -> ParsedResponse:
    """Convert the body of a call of /v1/responses. `seed` is the default seed. Raises InvalidField."""
    fields = Fields(body)
    fields.text("model")  # the route has already used this field
    refuse_values(fields, REFUSED_IN_RESPONSES)
    leave_quiet(fields)
    require_chats(facts, "input")
    messages = read_conversation(fields)
    tools = read_tools(fields, facts, flat=True)
    reasoning, text = (fields.fields(name) or Fields({}, name) for name in ("reasoning", "text"))
    thinking = read_thinking(fields, facts, reasoning)
    wanted = read_text_format(fields, text)
    refuse_values(text, _REFUSED_IN_TEXT)
    # Most optional parts of the answer belong to tools that this server does not support.
    included = read_strings(fields, "include") or []
    options = Options(
        stream=_streams(fields),
        seed=read_seed(fields, seed),
        max_tokens=fields.integer("max_output_tokens", 1),
        stop=read_stop(fields, "stop"),
        sampling=read_sampling(fields, facts),
        logprobs=_logprobs(fields, LOGPROBS in included),
        response_format=wanted,
        adapters=read_adapters(fields, facts),
    )
    request = chat_request(messages, tools, thinking, options)
    return ParsedResponse(
        requests=(request,),
        stream=options.stream,
        seed=options.seed,
        settings=_settings(fields, request, tools, reasoning, text),
        ignored=(
            *thinking.without_effect,
            *(f"include.{name}" for name in included if name != LOGPROBS),
            *fields.unread(),
        ),
    )


def _streams(fields: Fields) -> bool:
    options = fields.fields("stream_options")
    if options is not None:
        leave_obfuscation(options)
    return bool(fields.boolean("stream"))


def _logprobs(fields: Fields, wanted: bool) -> int | None:
    """Return the requested number of likeliest tokens at each position, or None without log-probabilities."""
    most = fields.integer("top_logprobs", 0, MOST_LOGPROBS)
    if most and not wanted:
        raise InvalidField("top_logprobs", f'needs "{LOGPROBS}" in include')
    return most or 0 if wanted else None


def _settings(fields: Fields, request: Request, tools: ToolOptions, reasoning: Fields, text: Fields) -> dict[str, Any]:
    """Return the settings that are repeated in every answer. Raises InvalidField for invalid settings."""
    sampling = request.sampling
    return {
        "background": False,
        "instructions": fields.peek("instructions"),
        "max_output_tokens": request.max_tokens,
        "max_tool_calls": fields.integer("max_tool_calls", 1),  # limits hosted tools, which are not supported
        "metadata": _metadata(fields),
        "parallel_tool_calls": tools.parallel,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.peek("effort"), "summary": None},
        "service_tier": "default",
        "store": False,
        "text": {"format": _format(text), "verbosity": "medium"},
        "tool_choice": fields.peek("tool_choice") or AUTO,
        "tools": [*map(_tool, fields.peek("tools") or ())],
        "top_logprobs": request.logprobs or 0,
        "truncation": "disabled",
        **{name: fields.peek(name) for name in ("user", "safety_identifier", "prompt_cache_key")},
    }


def _metadata(fields: Fields) -> Mapping[str, Any]:
    metadata = fields.object("metadata") or {}
    if not all(type(value) is str for value in metadata.values()):
        raise InvalidField("metadata", "expected an object whose values are strings", code="invalid_type")
    return metadata


def _format(text: Fields) -> Mapping[str, Any]:
    wanted = text.peek("format") or {"type": "text"}
    return {"name": "", "description": None, "strict": False, **wanted} if "schema" in wanted else wanted


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "function", "description": None, "parameters": None, "strict": None, **tool}
