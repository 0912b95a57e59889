"""Converts the body of a call of the Responses API into a request for the engine.

The items of the conversation become the messages of a ChatPrompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.requests import AUTO, ModelFacts, Request, ToolCall
from llmrun.serving.protocol.declarations import missing, read
from llmrun.serving.protocol.errors import InvalidField
from llmrun.serving.protocol.openai.messages import (
    BETWEEN_PARTS,
    ToolOptions,
    allowed_tools,
    chosen_tool,
    definitions_of,
    message_of,
    text_of,
    unnamed_choice,
)
from llmrun.serving.protocol.openai.objects import Function
from llmrun.serving.protocol.openai.options import (
    Options,
    adapters_of,
    formats_of,
    json_schema_format,
    only_format,
    require_chats,
    sampling_of,
    seed_of,
    stops_of,
    thinking_of,
)
from llmrun.serving.protocol.openai.requests import chat_request
from llmrun.serving.protocol.openai_responses.objects import (
    LOGPROBS,
    InputItem,
    ResponseRequest,
    ResponseTool,
    Settings,
    TextFormat,
)
from llmrun.serving.protocol.parsed import Parsed

_THINKING: Final = "reasoning_content"
_TEXTS: Final = ("content", _THINKING)
_BETWEEN_SYSTEM_MESSAGES: Final = "\n\n"
_ANY_TEXT: Final[TextFormat] = {"type": "text"}


def conversation_of(given: ResponseRequest) -> tuple[Mapping[str, Any], ...]:
    """Return the messages of `instructions` and `input`. Raises InvalidField if `input` contains no messages."""
    conversation = _Conversation()
    instructions, items = given.get("instructions"), given["input"]
    if instructions:
        conversation.add({"role": "system", "content": instructions})
    if isinstance(items, str):
        conversation.add({"role": "user", "content": items})
    else:
        for item in items:
            conversation.add_item(item)
    if len(conversation.messages) == bool(instructions):
        raise InvalidField("input", "expected at least one message, got only thinking without text")
    return conversation.joined()


class _Conversation:
    """The messages of a conversation so far.

    An answer of the Responses API consists of several items: thinking, text, and tool calls. In a chat, these items
    form one message. Texts that can still grow are stored as lists of parts, because appending to a long string
    repeatedly takes quadratic time.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add_item(self, item: InputItem) -> None:
        """Add an item of the input."""
        if item["type"] == "reasoning":
            content = item.get("content", "")
            text = content if isinstance(content, str) else BETWEEN_PARTS.join(part["text"] for part in content)
            if text:
                self.add_thinking(text)
        elif item["type"] == "function_call":
            call = ToolCall(item["call_id"], item["name"], item["arguments"] or "{}")
            self._answer().setdefault("tool_calls", []).append(call.as_message())
        elif item["type"] == "function_call_output":
            self.add({"role": "tool", "content": text_of(item["output"]), "tool_call_id": item["call_id"]})
        elif item["type"] == "message":
            message = message_of(item)
            (self.add_answer if message["role"] == "assistant" else self.add)(message)

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


def _tools(given: ResponseRequest, facts: ModelFacts) -> ToolOptions:
    """Return the tools and the choice of tools. Raises InvalidField."""
    tools = definitions_of([*map(_function, given.get("tools", ()))], "tools[{}].name", facts)
    parallel, choice = given.get("parallel_tool_calls", True), given.get("tool_choice", AUTO)
    if isinstance(choice, str):
        return unnamed_choice(tools, choice, parallel)
    if choice["type"] == "function":
        return ToolOptions([*tools.values()], chosen_tool(choice["name"], "tool_choice.name", tools), parallel)
    names = [each["name"] for each in choice["tools"]]
    return allowed_tools(tools, names, "tool_choice.tools[{}].name", choice.get("mode", AUTO), parallel)


def _function(tool: ResponseTool) -> Function:
    function = dict(tool)
    function.pop("type", None)
    return cast("Function", function)


def _format(wanted: TextFormat) -> Iterator[ResponseFormat]:
    """Yield the format in `text.format`, unless it allows any text."""
    if wanted["type"] == "json_schema" and "schema" not in wanted:
        raise missing("text.format.schema")
    if wanted["type"] != "text" and "schema" in wanted:
        yield json_schema_format(wanted["schema"], "text.format.schema")
    elif wanted["type"] == "json_object":
        yield ResponseFormat(FormatKind.JSON_OBJECT, origin="text.format")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedResponse(Parsed):
    """A parsed call, which consists of a single request. `settings` are the settings that the answer repeats."""

    settings: Settings


def parse_response(body: dict[str, Any], facts: ModelFacts, seed: int) -> ParsedResponse:
    """Convert the body of a call of /v1/responses. `seed` is the default seed. Raises InvalidField."""
    given, ignored = read(ResponseRequest, body)
    require_chats(facts, "input")
    messages = conversation_of(given)
    tools = _tools(given, facts)
    thinking = thinking_of(given, facts, given.get("reasoning", {}).get("effort"), "reasoning.effort")
    # Most optional parts of the answer belong to tools that this server does not support.
    included = given.get("include", [])
    options = Options(
        stream=given.get("stream", False),
        seed=seed_of(given, seed),
        max_tokens=given.get("max_output_tokens"),
        stop=stops_of(given.get("stop")),
        sampling=sampling_of(given, facts),
        logprobs=_logprobs(LOGPROBS in included, given.get("top_logprobs")),
        response_format=only_format([*_format(given.get("text", {}).get("format", _ANY_TEXT)), *formats_of(given)]),
        adapters=adapters_of(given.get("lora"), facts),
    )
    request = chat_request(messages, tools, thinking, options)
    others = (f"include.{name}" for name in included if name != LOGPROBS)
    return ParsedResponse(
        requests=(request,),
        stream=options.stream,
        seed=options.seed,
        settings=_settings(given, request, tools),
        ignored=(*thinking.without_effect, *others, *ignored),
    )


def _logprobs(wanted: bool, most: int | None) -> int | None:
    """Return the number of likeliest tokens at each position, or None without log-probabilities."""
    if most and not wanted:
        raise InvalidField("top_logprobs", f'needs "{LOGPROBS}" in include')
    return most or 0 if wanted else None


def _settings(given: ResponseRequest, request: Request, tools: ToolOptions) -> Settings:
    sampling = request.sampling
    return {
        "background": False,
        "instructions": given.get("instructions"),
        "max_output_tokens": request.max_tokens,
        "max_tool_calls": given.get("max_tool_calls"),  # limits hosted tools, which are not supported
        "metadata": given.get("metadata", {}),
        "parallel_tool_calls": tools.parallel,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "previous_response_id": None,
        "reasoning": {"effort": given.get("reasoning", {}).get("effort"), "summary": None},
        "service_tier": "default",
        "store": False,
        "text": {"format": _shown(given.get("text", {}).get("format", _ANY_TEXT)), "verbosity": "medium"},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": [*map(_shown_tool, given.get("tools", ()))],
        "top_logprobs": request.logprobs or 0,
        "truncation": "disabled",
        "user": given.get("user"),
        "safety_identifier": given.get("safety_identifier"),
        "prompt_cache_key": given.get("prompt_cache_key"),
    }


def _shown(wanted: TextFormat) -> TextFormat:
    return {"name": "", "description": None, "strict": False, **wanted} if "schema" in wanted else wanted


def _shown_tool(tool: ResponseTool) -> ResponseTool:
    return {"type": "function", "description": None, "parameters": None, "strict": None, **tool}
