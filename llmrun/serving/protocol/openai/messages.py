"""Reads the model's input: the messages and tools of a chat, and the prompts of a completion."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llmrun.base.errors import ContextExceeded
from llmrun.engine.requests import (
    AUTO,
    LONGEST_TOOL_NAME,
    NONE,
    REQUIRED,
    FillPrompt,
    ModelFacts,
    TextPrompt,
    TokenPrompt,
)
from llmrun.serving.protocol.errors import InvalidField, unsupported
from llmrun.serving.protocol.fields import Fields, needed, seen

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS: Final = ("text", "input_text", "output_text")  # the Responses API uses input_text and output_text
_REFUSAL: Final = "refusal"
BETWEEN_PARTS: Final = "\n"  # llama.cpp and vLLM use this separator


def read_messages(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """Return the conversation of a ChatPrompt, with each content as text. Raises InvalidField."""
    return tuple(map(read_message, needed_messages(fields)))


def needed_messages(fields: Fields) -> list[Fields]:
    """Return the fields of each message. Raises InvalidField if there are no messages."""
    messages = needed(fields, "messages", fields.item_fields("messages"))
    if not messages:
        raise InvalidField("messages", "expected at least one message, got an empty list")
    return messages


def call_ids(messages: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Return the IDs of all tool calls in these messages."""
    calls = (call for message in messages for call in message.get("tool_calls") or ())
    return frozenset(call["id"] for call in calls if "id" in call)


def read_message(message: Fields) -> dict[str, Any]:
    """Return a message of a ChatPrompt, with its content as text. Raises InvalidField."""
    if message.peek("role") == "function":
        raise unsupported(message.path("role"), "this role is obsolete", hint="send results with the role tool")
    role = needed(message, "role", message.word("role", ROLES))
    for name, advice in (("function_call", "send `tool_calls` instead"), ("audio", "send text instead")):
        if message.value(name) is not None:
            raise unsupported(message.path(name), hint=advice)
    # Few templates support the newer role "developer".
    found: dict[str, Any] = {"role": "system" if role == "developer" else role}
    if role == "assistant":
        found |= _read_answer(message)
    else:
        content = read_content(message, "content")
        found["content"] = (content or "") if role == "tool" else needed(message, "content", content)
    for name in ("name", "tool_call_id") if role == "tool" else ("name",):
        if (value := message.text(name)) is not None:
            found[name] = value
    return found


def _read_answer(message: Fields) -> Mapping[str, Any]:
    """Read the fields that only assistant messages contain."""
    content = read_content(message, "content", (*_TEXT_PARTS, _REFUSAL))
    refusal = message.text(_REFUSAL)
    found: dict[str, Any] = {"content": content or refusal or ""}
    calls = message.item_fields("tool_calls")
    if calls:
        found["tool_calls"] = [*map(_read_call, calls)]
    leave_empty(message, "annotations")  # every answer of OpenAI's API contains this field
    reasoning = [message.text(name) for name in ("reasoning_content", "reasoning")]
    text = next((text for text in reasoning if text is not None), None)
    if text is not None:
        found["reasoning_content"] = text
    return found


def read_content(message: Fields, name: str, kinds: tuple[str, ...] = _TEXT_PARTS) -> str | None:
    """Return a field that is a string or a list of parts as text, or None if it is missing. Raises InvalidField."""
    content = message.value(name)
    if content is None or type(content) is str:
        return content
    if type(content) is not list:
        raise message.wrong(name, "a string or a list of parts")
    parts = message.item_fields(name) or ()
    return BETWEEN_PARTS.join(_read_part(part, kinds) for part in parts)


def _read_part(part: Fields, kinds: tuple[str, ...]) -> str:
    kind = part.needed_text("type")
    if kind not in kinds:
        raise unsupported(part.place, f"parts of the type {seen(kind)} are not supported", hint="send text only")
    leave_empty(part, "annotations")  # every answer of the Responses API contains this field
    leave_empty(part, "logprobs")
    return part.needed_text(_REFUSAL if kind == _REFUSAL else "text")


def leave_empty(fields: Fields, name: str) -> None:
    """Mark a field as read if the value is an empty list."""
    if fields.peek(name) == []:
        fields.value(name)


def _read_call(call: Fields) -> dict[str, Any]:
    if call.peek("type") not in (None, "function"):
        raise unsupported(call.path("type"), "only calls of functions are supported")
    call.value("type")
    function = _nested(call)
    name, arguments = function.needed_text("name"), function.value("arguments")
    if not name:
        raise InvalidField(function.path("name"), "empty")
    if arguments is not None and type(arguments) not in (str, dict):
        raise function.wrong("arguments", "a JSON object as a string")
    call_id = call.text("id")
    found = {"type": "function", "function": {"name": name, "arguments": arguments or "{}"}}
    return found if call_id is None else {"id": call_id, **found}


MOST_TOOLS: Final = 128  # OpenAI's API has the same limit
NAME: Final = rf"[a-zA-Z0-9_-]{{1,{LONGEST_TOOL_NAME}}}"
_WORDS: Final = (NONE, AUTO, REQUIRED)
_FUNCTION_FIELDS: Final = ("name", "description", "parameters", "strict")
_FUNCTIONS_ONLY: Final = "only functions are supported"


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """The tools of a ChatPrompt. The class ChatPrompt describes these fields."""

    tools: Sequence[Mapping[str, Any]] | None
    choice: str
    parallel: bool

    @property
    def may_be_called(self) -> bool:
        return self.tools is not None and self.choice != NONE


def read_tools(fields: Fields, facts: ModelFacts, *, flat: bool = False) -> ToolOptions:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`. Raises InvalidField.

    flat  True for the form of the Responses API, where `tools` and `tool_choice` contain no inner object `function`
    """
    tools = _read_definitions(fields, flat)
    check_takes_tools(tools, facts)
    parallel = fields.boolean("parallel_tool_calls")
    choice, allowed = _read_choice(fields, tools, flat)
    chosen = [tool for name, tool in tools.items() if name in allowed]
    return ToolOptions(chosen or None, choice, parallel is not False)


def read_list(fields: Fields) -> Sequence[Fields]:
    """Return the items of `tools`. Raises InvalidField if there are too many tools."""
    given = fields.item_fields("tools") or []
    if len(given) > MOST_TOOLS:
        raise InvalidField("tools", f"{len(given):,} tools are too many; the limit is {MOST_TOOLS}")
    return given


def read_definition(tool: Fields, schema: str, others: Container[str]) -> str:
    """Return the name of a tool and check the other fields of its definition. Raises InvalidField.

    schema  the name of the field with the JSON schema of the arguments
    others  the names of the tools before this one
    """
    name = tool.needed_text("name")
    if not re.fullmatch(NAME, name):
        words = f"expected 1 to {LONGEST_TOOL_NAME} letters, digits, underscores and hyphens, got {seen(name)}"
        raise InvalidField(tool.path("name"), words)
    if name in others:
        raise InvalidField(tool.path("name"), f"two tools have the name {name}")
    tool.text("description")
    tool.object(schema)
    tool.boolean("strict")
    return name


def check_takes_tools(tools: Mapping[str, object], facts: ModelFacts) -> None:
    """Raise InvalidField if there are tools but the model does not support tools."""
    if tools and not facts.takes_tools:
        raise unsupported("tools", "this model does not support tools", hint="use a model trained to call tools")


def read_reference(reference: Fields, tools: Container[str]) -> str:
    """Return the name of the tool that the field `name` refers to. Raises InvalidField for unknown tools."""
    name = reference.needed_text("name")
    if name not in tools:
        raise InvalidField(reference.path("name"), f"no tool has the name {seen(name)}")
    return name


def read_chosen(choice: Fields, tools: Container[str]) -> str:
    """Return the name of the tool that must be called, as `tool_choice` of a ChatPrompt. Raises InvalidField."""
    name = read_reference(choice, tools)
    if name in _WORDS:
        raise unsupported(choice.path("name"), f"a tool with the name {name} cannot be chosen")
    return name


def check_any(tools: Mapping[str, object]) -> None:
    """Raise InvalidField if a tool call is required but there are no tools."""
    if not tools:
        raise InvalidField("tool_choice", "a tool call is required, but there are no tools")


def _read_definitions(fields: Fields, flat: bool) -> dict[str, Mapping[str, Any]]:
    """Return the definitions of tools by name."""
    tools: dict[str, Mapping[str, Any]] = {}
    for tool in read_list(fields):
        if tool.text("type") not in (None, "function"):
            raise unsupported(tool.path("type"), _FUNCTIONS_ONLY)
        function = tool if flat else _nested(tool)
        name = read_definition(function, "parameters", tools)
        # Templates also receive the unknown fields of an object `function`, but no unknown fields of a flat tool.
        tools[name] = {"type": "function", "function": function.given(_FUNCTION_FIELDS if flat else None)}
    return tools


def _nested(tool: Fields) -> Fields:
    """Return the fields of the object `function` in a tool."""
    return needed(tool, "function", tool.fields("function"))


def _read_choice(fields: Fields, tools: Mapping[str, object], flat: bool) -> tuple[str, frozenset[str]]:
    """Return `tool_choice` in the form of ChatPrompt, and the names of the tools that may be called."""
    everything = frozenset(tools)
    value = fields.value("tool_choice")
    if value is None:
        return AUTO, everything
    if type(value) is str:
        if value not in _WORDS:
            raise fields.wrong("tool_choice", "one of none, auto, required, or an object")
        if value == REQUIRED:
            check_any(tools)
        return value, everything
    choice = needed(fields, "tool_choice", fields.fields("tool_choice"))
    kind = choice.needed_text("type")
    if kind == "allowed_tools":
        return _read_allowed(choice, tools, flat)
    if kind != "function":
        raise unsupported("tool_choice.type", _FUNCTIONS_ONLY)
    return read_chosen(_function_of(choice, flat), tools), everything


def _read_allowed(choice: Fields, tools: Mapping[str, object], flat: bool) -> tuple[str, frozenset[str]]:
    """Read a `tool_choice` of the type allowed_tools, which allows some of the tools."""
    allowed = needed(choice, "allowed_tools", choice if flat else choice.fields("allowed_tools"))
    mode = allowed.word("mode", (AUTO, REQUIRED)) or AUTO
    names = frozenset(read_reference(_function_of(item, flat), tools) for item in allowed.item_fields("tools") or ())
    if not names:
        raise InvalidField(allowed.path("tools"), "expected at least one tool")
    return mode, names


def _function_of(reference: Fields, flat: bool) -> Fields:
    """Return the fields that contain the name of a tool reference, in the nested or the flat form."""
    reference.word("type", ("function",))
    return reference if flat else _nested(reference)


_WANTED: Final = "a string, a list of strings, a list of token IDs, or a list of such lists"


def read_prompts(fields: Fields, facts: ModelFacts) -> tuple[TextPrompt | TokenPrompt | FillPrompt, ...]:
    """Return one or more prompts from `prompt`. Raises InvalidField and ContextExceeded.

    If the request has a `suffix`, the answer fills the gap between each prompt and the suffix.

    Lists of tokens that exceed the context are refused here, because sending millions of numbers to the engine's
    process would hold up all other requests.
    """
    prompts = text_prompts(fields, "prompt", facts)
    longest = max((len(prompt.tokens) for prompt in prompts if isinstance(prompt, TokenPrompt)), default=0)
    if longest >= facts.info.context_size:
        raise ContextExceeded.by_prompt(longest, facts.info.context_size, hint="shorten the prompt")
    suffix = fields.text("suffix")
    return tuple(_filled(prompt, suffix, facts) for prompt in prompts) if suffix else prompts


def require_filling(facts: ModelFacts, param: str) -> None:
    """Raise InvalidField for the field `param` if the model does not support fill-in-the-middle."""
    if not facts.fills:
        raise unsupported(param, "this model cannot fill in the middle", hint="its vocabulary lacks tokens for filling")


def _filled(prompt: TextPrompt | TokenPrompt, suffix: str, facts: ModelFacts) -> FillPrompt:
    require_filling(facts, "suffix")
    if isinstance(prompt, TokenPrompt):
        raise unsupported("suffix", "supported only for prompts that are text")
    return FillPrompt(prompt.text, suffix)


def text_prompts(fields: Fields, name: str, facts: ModelFacts) -> tuple[TextPrompt | TokenPrompt, ...]:
    """Return the text prompts and token prompts in a required field. Raises InvalidField."""
    value = needed(fields, name, fields.value(name))
    if type(value) is str:
        return (TextPrompt(value),)
    if type(value) is not list or not value:
        raise fields.wrong(name, _WANTED)
    if type(value[0]) is int:
        return (_tokens(value, name, facts),)
    return tuple(_prompt(item, f"{name}[{number}]", facts) for number, item in enumerate(value))


def read_tokens(fields: Fields, name: str, facts: ModelFacts) -> tuple[int, ...]:
    """Return a required list of token IDs. Raises InvalidField."""
    value = needed(fields, name, fields.items(name))
    return tuple(_tokens(value, fields.path(name), facts).tokens)


def _prompt(item: Any, place: str, facts: ModelFacts) -> TextPrompt | TokenPrompt:
    if type(item) is str:
        return TextPrompt(item)
    if type(item) is list and item:
        return _tokens(item, place, facts)
    raise InvalidField(place, f"expected a string or a list of token IDs, got {seen(item)}", code="invalid_type")


def _tokens(ids: list[Any], place: str, facts: ModelFacts) -> TokenPrompt:
    for number, token in enumerate(ids):
        if type(token) is not int:
            raise InvalidField(f"{place}[{number}]", f"expected a token ID, got {seen(token)}", code="invalid_type")
        if not 0 <= token < facts.info.vocabulary_size:
            last = facts.info.vocabulary_size - 1
            raise InvalidField(f"{place}[{number}]", f"expected a token ID from 0 to {last}, got {seen(token)}")
    return TokenPrompt(tuple(ids))
