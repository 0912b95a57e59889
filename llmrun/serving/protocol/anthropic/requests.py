"""Converts the bodies of Anthropic's /v1/messages into requests for the engine.

The system prompt, the messages and the tools are converted to the form of chat completions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, Final

from llmrun.engine.constraint.base import ResponseFormat
from llmrun.engine.requests import AUTO, NONE, REQUIRED, ChatPrompt, ModelFacts, Request
from llmrun.serving.protocol.errors import InvalidField, unsupported
from llmrun.serving.protocol.fields import Fields, missing, needed, seen
from llmrun.serving.protocol.openai import options as common
from llmrun.serving.protocol.openai.messages import (
    BETWEEN_PARTS,
    ToolOptions,
    check_any,
    check_takes_tools,
    needed_messages,
    read_chosen,
    read_definition,
    read_list,
)
from llmrun.serving.protocol.openai.options import (
    json_schema_format,
    read_sampling,
    read_seed,
    read_stop,
    refuse_values,
    require_chats,
)
from llmrun.serving.protocol.parsed import Parsed

KINDS: Final = ("enabled", "disabled", "adaptive")
DISPLAYS: Final = ("summarized", "omitted")
EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
# Maps the fields of chat completions to the names of Anthropic's API
_NAMES: Final = {
    "enable_thinking": "thinking",
    "thinking_budget_tokens": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
}


def read_thinking(fields: Fields, config: Fields, facts: ModelFacts) -> tuple[common.ThinkingOptions, bool]:
    """Return the options in `thinking` and `output_config`, and whether the answer contains the text of the thinking.

    Raises InvalidField.

    Without the field `thinking`, the model does not think if thinking can be switched off, because many programs
    expect answers that begin with a text block.
    """
    wanted = fields.fields("thinking") or Fields({"type": "disabled"}, "thinking")
    kind = needed(wanted, "type", wanted.word("type", KINDS))
    shown = wanted.word("display", DISPLAYS) != "omitted"
    budget = wanted.integer("budget_tokens", 1) if kind == "enabled" else None
    effort = config.word("effort", EFFORTS)
    known: dict[str, Any] = {"enable_thinking": kind != "disabled", "thinking_budget_tokens": budget}
    if kind != "disabled":
        known["reasoning_effort"] = effort
    elif effort is not None:
        known["chat_template_kwargs"] = {"reasoning_effort": effort}  # a template variable does not turn thinking on
    options = common.read_thinking(Fields(known, "thinking"), facts)
    return replace(options, without_effect=tuple(_NAMES[name] for name in options.without_effect)), shown


def read_format(fields: Fields, config: Fields) -> ResponseFormat | None:
    """Read the format in `output_config`, or in the older field `output_format`. Raises InvalidField."""
    found = [_json_format(place, name) for place, name in ((config, "format"), (fields, "output_format"))]
    formats = [each for each in found if each is not None]
    if len(formats) > 1:
        raise InvalidField("output_format", "cannot be combined with output_config.format", hint="send only one format")
    return formats[0] if formats else None


def _json_format(place: Fields, name: str) -> ResponseFormat | None:
    wanted = place.fields(name)
    if wanted is None:
        return None
    needed(wanted, "type", wanted.word("type", ("json_schema",)))
    schema = needed(wanted, "schema", wanted.object("schema"))
    return json_schema_format(schema, wanted.path("schema"))


CHOICES: Final = ("auto", "any", "tool", "none")
_SCHEMA: Final = "input_schema"
_QUIET: Final = ("cache_control", "eager_input_streaming")  # llmrun always caches prefixes and streams arguments


def read_tools(fields: Fields, facts: ModelFacts) -> ToolOptions:
    """Read `tools` and `tool_choice`. Raises InvalidField."""
    tools: dict[str, Mapping[str, Any]] = {}
    for tool in read_list(fields):
        kind = tool.text("type")
        if kind not in (None, "custom"):
            hint = f"define a tool with a name and its {_SCHEMA}"
            raise unsupported(tool.path("type"), f"only custom tools are supported, got {seen(kind)}", hint=hint)
        name = read_definition(tool, _SCHEMA, tools)
        needed(tool, _SCHEMA, tool.peek(_SCHEMA))
        for quiet in _QUIET:
            tool.value(quiet)
        kept = {key: tool.peek(key) for key in ("description", "strict") if tool.peek(key) is not None}
        tools[name] = {"type": "function", "function": {"name": name, **kept, "parameters": tool.peek(_SCHEMA)}}
    check_takes_tools(tools, facts)
    choice, parallel = _read_choice(fields, tools)
    return ToolOptions([*tools.values()] or None, choice, parallel)


def _read_choice(fields: Fields, tools: Mapping[str, object]) -> tuple[str, bool]:
    """Return `tool_choice` in the form of ChatPrompt, and whether one answer may have several calls."""
    choice = fields.fields("tool_choice")
    if choice is None:
        return AUTO, True
    parallel = not choice.boolean("disable_parallel_tool_use")
    kind = needed(choice, "type", choice.word("type", CHOICES))
    if kind == "tool":
        return read_chosen(choice, tools), parallel
    if kind == "any":
        check_any(tools)
    return {"auto": AUTO, "any": REQUIRED, "none": NONE}[kind], parallel


ROLES: Final = ("user", "assistant", "system")
# Claude Code begins its system prompt with this line for Anthropic's accounting. The line may differ in every request,
# which would prevent the reuse of cached prefixes.
BILLING: Final = "x-anthropic-billing-header"
_BILLING: Final = re.compile(rf"{BILLING}:(?:\s*\w+=[^;\n]*;)*\s*")

Message = dict[str, Any]


def read_conversation(fields: Fields) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    """Return the messages of `system` and `messages`, and the names of omitted parts of the system prompt.

    Raises InvalidField.

    Consecutive messages of the same role are merged, as in Anthropic's API. Tool results become separate messages. Many
    templates allow a system message only at the beginning, so later system messages become parts of user messages, in
    the tags that Claude Code uses for reminders.
    """
    given = needed_messages(fields)
    system = _read_texts(fields, "system")
    kept = [text for text in map(_without_billing, system) if text]
    first = [{"role": "system", "content": BETWEEN_PARTS.join(kept)}] if kept else []
    read = chain.from_iterable(map(_read_message, given))
    found = tuple(_merged(_reminding(chain(first, read))))
    if found[-1].get("tool_calls"):
        raise InvalidField("messages", "the last message calls tools, but their results are missing")
    return found, (BILLING,) if any(map(_BILLING.match, system)) else ()


def _without_billing(text: str) -> str:
    return _BILLING.sub("", text, count=1) if _BILLING.match(text) else text


def _reminding(messages: Iterable[Message]) -> Iterator[Message]:
    """Yield the messages, converting all system messages that are not at the beginning to user messages."""
    is_begun = False
    for message in messages:
        if message["role"] != "system":
            is_begun = True
        elif is_begun:
            message = {"role": "user", "content": f"<system-reminder>\n{message['content']}\n</system-reminder>"}
        yield message


def _merged(messages: Iterable[Message]) -> Iterator[Message]:
    """Yield the messages, merging consecutive messages of the same role."""
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
    role = needed(message, "role", message.word("role", ROLES))
    needed(message, "content", message.peek("content"))
    if role == "assistant":
        return [_read_answer(message)]
    if role == "system":
        return [{"role": role, "content": BETWEEN_PARTS.join(_read_texts(message, "content"))}]
    return _read_user_message(message)


def _read_user_message(message: Fields) -> list[Message]:
    """Return the tool results in a user message, followed by the message's text."""
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
        elif kind != "redacted_thinking":  # only Anthropic can decrypt this block
            texts.append(_read_text(block))
    found: Message = {"role": "assistant", "content": BETWEEN_PARTS.join(texts)}
    if any(thoughts):
        found["reasoning_content"] = BETWEEN_PARTS.join(thoughts)
    if calls:
        found["tool_calls"] = calls
    return found


def _read_call(block: Fields) -> Message:
    name = block.needed_text("name")
    if not name:
        raise InvalidField(block.path("name"), "empty")
    arguments = needed(block, "input", block.object("input"))
    return {
        "id": block.needed_text("id"),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _read_texts(fields: Fields, name: str) -> list[str]:
    """Return the texts of a field, which may be missing, a string, or a list of text blocks."""
    return [*map(_read_text, _blocks(fields, name))]


def _blocks(fields: Fields, name: str) -> list[str | Fields]:
    value = fields.value(name)
    if value is None or type(value) is str:
        return [] if value is None else [value]
    if type(value) is not list:
        raise fields.wrong(name, "a string or a list of blocks")
    return [*(fields.item_fields(name) or ())]


def _kind_of(block: Fields) -> str:
    block.value("cache_control")  # prompt prefixes are always cached
    return block.needed_text("type")


def _read_text(block: str | Fields) -> str:
    if isinstance(block, str):
        return block
    if (kind := _kind_of(block)) != "text":
        raise unsupported(block.place, f"blocks of the type {seen(kind)} are not supported here", hint="send text")
    return block.needed_text("text")


# Maps unsupported fields that would change the answer to accepted values and advice
REFUSED: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "container": ((), "run the model's tools in the client"),
    "mcp_servers": (([],), "connect the client to the MCP servers, and send their tools"),
    "fallbacks": (([],), ""),
    "thread": ((), "send all messages"),
    "compaction": ((), "summarize the conversation in the client"),
}
# Values of fields that are not reported as ignored, because they are the defaults
_USUAL: Final[Mapping[str, tuple[str, ...]]] = {"service_tier": ("auto", "standard_only"), "speed": ("standard",)}
# This edit has no effect, because the model's template decides whether the prompt contains past thinking.
KNOWN_EDIT: Final = "clear_thinking_20251015"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedMessage(Parsed):
    """The request for one message. `shows_thinking` is True if the answer contains the text of the thinking."""

    shows_thinking: bool


@dataclass(frozen=True, slots=True)
class _Question:
    """The fields that /v1/messages and /v1/messages/count_tokens share.

    request  the request without options
    """

    request: Request
    tools: ToolOptions
    wanted: ResponseFormat | None
    shows_thinking: bool
    ignored: tuple[str, ...]


def parse_message(body: dict[str, Any], facts: ModelFacts, seed: int) -> ParsedMessage:
    """Convert the body of /v1/messages. `seed` is the default seed. Raises InvalidField."""
    fields = Fields(body)
    question = _read_question(fields, facts)
    max_tokens = needed(fields, "max_tokens", fields.integer("max_tokens", 1))
    wanted = question.wanted
    if wanted is not None and question.tools.may_be_called:
        raise unsupported(wanted.origin, "cannot be combined with tools", hint='set tool_choice to {"type": "none"}')
    seed = read_seed(fields, seed)
    request = replace(
        question.request,
        max_tokens=max_tokens,
        stop=read_stop(fields, "stop_sequences"),
        sampling=replace(read_sampling(fields, facts), seed=seed),
        response_format=wanted,
    )
    stream = bool(fields.boolean("stream"))
    return ParsedMessage(
        requests=(request,),
        stream=stream,
        ignored=(*question.ignored, *fields.unread()),
        seed=seed,
        shows_thinking=question.shows_thinking,
    )


def parse_count(body: dict[str, Any], facts: ModelFacts) -> Parsed:
    """Convert the body of /v1/messages/count_tokens to a request with the prompt to count. Raises InvalidField."""
    fields = Fields(body)
    question = _read_question(fields, facts)
    return Parsed(requests=(question.request,), stream=False, ignored=(*question.ignored, *fields.unread()))


def _read_question(fields: Fields, facts: ModelFacts) -> _Question:
    if not fields.text("model"):
        raise missing("model")
    require_chats(facts)
    _read_extras(fields)
    messages, left_out = read_conversation(fields)
    continues = messages[-1]["role"] == "assistant"  # the last message is the beginning of the answer
    tools = read_tools(fields, facts)
    if continues and tools.may_be_called:
        hint = 'end with a message of the role "user", or set tool_choice to {"type": "none"}'
        raise unsupported("messages", "an answer cannot be continued with tools", hint=hint)
    config = fields.fields("output_config") or Fields({}, "output_config")
    thinking, shown = read_thinking(fields, config, facts)
    prompt = ChatPrompt(messages, tools.tools, tools.choice, tools.parallel, not continues, thinking.variables)
    request = Request(prompt, think=thinking.think, think_budget=thinking.budget)
    return _Question(request, tools, read_format(fields, config), shown, (*left_out, *thinking.without_effect))


def _read_extras(fields: Fields) -> None:
    """Read the fields that do not change the answer, and refuse unsupported fields that would change the answer."""
    refuse_values(fields, REFUSED)
    metadata = fields.fields("metadata")
    if metadata is not None:
        metadata.text("user_id")
    fields.object("cache_control")  # prompt prefixes are always cached
    for name, values in _USUAL.items():
        if fields.peek(name) in values:
            fields.value(name)
    management = fields.fields("context_management")
    for edit in (management.item_fields("edits") if management is not None else None) or ():
        if (kind := edit.text("type")) != KNOWN_EDIT:
            words = f"only {KNOWN_EDIT} is supported, got {seen(kind)}"
            raise unsupported(edit.path("type"), words, hint="shorten the conversation in the client")
        if edit.peek("keep") == "all":
            edit.value("keep")
