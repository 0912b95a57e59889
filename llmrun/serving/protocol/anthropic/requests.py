"""Converts the bodies of Anthropic's /v1/messages into requests for the engine.

The system prompt, the messages and the tools are converted to the form of chat completions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, Final, TypeGuard

from msgspec import structs

from llmrun.engine.constraint.base import ResponseFormat
from llmrun.engine.requests import AUTO, DEFERRED, NONE, REQUIRED, ChatPrompt, ModelFacts, Request
from llmrun.engine.templates.chat_template import reminder
from llmrun.serving.protocol.anthropic.objects import (
    AnthropicTool,
    AssistantBlock,
    ImageBlock,
    MessageCountRequest,
    MessageRequest,
    ResultBlock,
    ResultContent,
    Texts,
    ThinkingConfig,
    Turn,
    UserBlock,
)
from llmrun.serving.protocol.declarations import read
from llmrun.serving.protocol.errors import InvalidField, unsupported
from llmrun.serving.protocol.images import BETWEEN_PARTS, Images, Piece, content_of, pieces_of, with_images
from llmrun.serving.protocol.openai.messages import (
    ToolOptions,
    chosen_tool,
    definitions_of,
    function_definition,
    unnamed_choice,
)
from llmrun.serving.protocol.openai.objects import Function, Thinking
from llmrun.serving.protocol.openai.options import (
    ThinkingOptions,
    json_schema_format,
    require_chats,
    sampling_of,
    seed_of,
    stops_of,
    thinking_of,
)
from llmrun.serving.protocol.parsed import Parsed, left_out_paths

# Maps the fields of chat completions to the names of Anthropic's API
_NAMES: Final = {"enable_thinking": "thinking", "thinking_budget_tokens": "thinking.budget_tokens"}

_SEARCH_TYPE: Final = "tool_search_tool"  # the types of Anthropic's tools that search for tools begin with this text

_NO_THINKING: Final[ThinkingConfig] = {"type": "disabled"}


def _thinking(given: MessageCountRequest, facts: ModelFacts) -> tuple[ThinkingOptions, bool]:
    """Return the options for thinking, and whether the answer contains the text of the thinking.

    Without the field `thinking`, the model does not think if thinking can be switched off, because many programs
    expect answers that begin with a text block.
    """
    wanted, effort = given.get("thinking", _NO_THINKING), given.get("output_config", {}).get("effort")
    options: Thinking = {"enable_thinking": wanted["type"] != "disabled"}
    if wanted["type"] == "enabled" and "budget_tokens" in wanted:
        options["thinking_budget_tokens"] = wanted["budget_tokens"]
    if wanted["type"] == "disabled" and effort is not None:
        options["chat_template_kwargs"] = {"reasoning_effort": effort}  # a template variable does not turn thinking on
        effort = None
    found = thinking_of(options, facts, effort, "output_config.effort")
    names = tuple(_NAMES.get(name, name) for name in found.without_effect)
    return replace(found, without_effect=names), wanted.get("display") != "omitted"


def _format(given: MessageCountRequest) -> ResponseFormat | None:
    """Return the format in `output_config`, or in the older field `output_format`. Raises InvalidField."""
    wanted, older = given.get("output_config", {}).get("format"), given.get("output_format")
    if wanted is not None and older is not None:
        raise InvalidField("output_format", "cannot be combined with output_config.format", hint="send only one format")
    if wanted is not None:
        return json_schema_format(wanted["schema"], "output_config.format.schema")
    return None if older is None else json_schema_format(older["schema"], "output_format.schema")


def _tools(given: MessageCountRequest, facts: ModelFacts) -> ToolOptions:
    """Return the tools and the choice of tools. Raises InvalidField."""
    listed = given.get("tools", ())
    deferred = _deferred(listed)
    hidden = deferred - {*_references(given["messages"])}
    own = [(number, tool) for number, tool in enumerate(listed) if _is_supported(tool) and tool["name"] not in hidden]
    defined = [(f"tools[{number}].name", _definition(tool, deferred)) for number, tool in own]
    tools = definitions_of(defined, facts)
    left_out = left_out_paths(tool["type"] for tool in listed if not _is_supported(tool))
    return replace(_chosen(given, tools), left_out=left_out)


def _deferred(tools: Sequence[Mapping[str, object]]) -> frozenset[str]:
    """Return the names of the tools that only results describe. A new tool then leaves the earlier prompt unchanged.

    No tool is deferred if the model could not search for tools: if the search is a tool that only Anthropic can run, or
    if all tools are deferred.
    """
    deferred = frozenset(tool["name"] for tool in tools if _is_supported(tool) and tool.get("defer_loading"))
    can_search = not any(str(tool["type"]).startswith(_SEARCH_TYPE) for tool in tools)
    return deferred if can_search and len(deferred) < len(tools) else frozenset()


def _references(turns: Iterable[Turn]) -> Iterator[str]:
    """Yield the names of the tools that results refer to."""
    for turn in turns:
        if turn["role"] != "user" or isinstance(turn["content"], str):
            continue
        for block in turn["content"]:
            content = block.get("content", "") if block["type"] == "tool_result" else ""
            if not isinstance(content, str):
                yield from (part["tool_name"] for part in content if part["type"] == "tool_reference")


def _definition(tool: AnthropicTool, deferred: Container[str]) -> Mapping[str, Any]:
    definition = function_definition(_function(tool))
    return {**definition, DEFERRED: True} if tool["name"] in deferred else definition


def _is_supported(tool: Mapping[str, object]) -> TypeGuard[AnthropicTool]:
    return tool["type"] == "custom"


def _chosen(given: MessageCountRequest, tools: Mapping[str, Mapping[str, Any]]) -> ToolOptions:
    choice = given.get("tool_choice")
    if choice is None:
        return unnamed_choice(tools, AUTO, parallel=True)
    parallel = not choice.get("disable_parallel_tool_use")
    if choice["type"] == "tool":
        return ToolOptions([*tools.values()], chosen_tool(choice["name"], "tool_choice.name", tools), parallel)
    return unnamed_choice(tools, {"auto": AUTO, "any": REQUIRED, "none": NONE}[choice["type"]], parallel)


def _function(tool: AnthropicTool) -> Function:
    function: Function = {"name": tool["name"]}
    if "description" in tool:
        function["description"] = tool["description"]
    if "strict" in tool:
        function["strict"] = tool["strict"]
    function["parameters"] = tool["input_schema"]
    return function


# Claude Code begins its system prompt with this line for Anthropic's accounting. The line may differ in every request,
# which would prevent the reuse of cached prefixes.
BILLING: Final = "x-anthropic-billing-header"
_BILLING: Final = re.compile(rf"{BILLING}:(?:\s*\w+=[^;\n]*;)*\s*")

Message = dict[str, Any]


def conversation_of(
    given: MessageCountRequest, images: Images
) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    """Return the messages of `system` and `messages`, and the names of omitted parts of the system prompt.

    The images of the messages are added to `images`. Raises InvalidField.

    Consecutive messages of the same role are merged, as in Anthropic's API. Tool results become separate messages. Many
    templates allow a system message only at the beginning, so later system messages become parts of user messages, in
    the tags that Claude Code uses for reminders.
    """
    system = _texts(given.get("system", []))
    kept = [text for text in map(_without_billing, system) if text]
    first = [{"role": "system", "content": BETWEEN_PARTS.join(kept)}] if kept else []
    tools = {tool["name"]: tool for tool in given.get("tools", ()) if _is_supported(tool)}
    turns = chain.from_iterable(
        _messages_of(turn, tools, images, f"messages[{number}].content")
        for number, turn in enumerate(given["messages"])
    )
    found = tuple(_merged(_reminding(chain(first, turns))))
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
            message = {"role": "user", "content": reminder(message["content"])}
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
        if contents := [message[name] for message in messages if message.get(name)]:
            merged[name] = content_of(chain.from_iterable(map(pieces_of, contents)))
    if calls := [call for message in messages for call in message.get("tool_calls", ())]:
        merged["tool_calls"] = calls
    return merged


def _text(content: Texts) -> str:
    return BETWEEN_PARTS.join(_texts(content))


def _texts(content: Texts) -> list[str]:
    return [content] if isinstance(content, str) else [block["text"] for block in content]


def _messages_of(turn: Turn, tools: Mapping[str, AnthropicTool], images: Images, place: str) -> list[Message]:
    if turn["role"] == "system":
        return [{"role": "system", "content": _text(turn["content"])}]
    if turn["role"] == "assistant":
        return [_answer_of(turn["content"])]
    return _user_messages_of(turn["content"], tools, images, place)


def _user_messages_of(
    content: str | Sequence[UserBlock], tools: Mapping[str, AnthropicTool], images: Images, place: str
) -> list[Message]:
    """Return the tool results in a user message, followed by the message's texts and images."""
    pieces, results = list[Piece](), list[Message]()
    for number, block in enumerate([content] if isinstance(content, str) else content):
        at = f"{place}[{number}]"
        if isinstance(block, str):
            pieces.append(block)
        elif block["type"] == "text":
            pieces.append(block["text"])
        elif block["type"] == "image":
            pieces.append(images.part(_data_of(block), f"{at}.source.data"))
        else:
            result = [*_result(block.get("content", ""), tools, images, f"{at}.content")]
            result = _as_error(result) if block.get("is_error") else result
            found = {"role": "tool", "tool_call_id": block.get("tool_use_id", ""), "content": content_of(result)}
            results.append(found)
    if results and not pieces:
        return results
    return [*results, {"role": "user", "content": content_of(pieces)}]


def _as_error(result: Sequence[Piece]) -> list[Piece]:
    """Return a result that says that it is an error, because chat templates have no field for errors."""
    first = result[0] if result else ""
    if not isinstance(first, str):
        return ["Error:", *result]
    return [first if first.lower().startswith("error") else f"Error: {first}", *result[1:]]


def _data_of(block: ImageBlock) -> str:
    source = block["source"]
    assert source["type"] == "base64", "the declaration refuses other sources"
    return source["data"]


def _result(content: ResultContent, tools: Mapping[str, AnthropicTool], images: Images, place: str) -> Iterator[Piece]:
    if isinstance(content, str):
        yield content
    else:
        yield from (_part(block, tools, images, f"{place}[{number}]") for number, block in enumerate(content))


def _part(block: ResultBlock, tools: Mapping[str, AnthropicTool], images: Images, place: str) -> Piece:
    """Return the text of a part of a result, or an image.

    A reference to a tool becomes the tool's definition, in the form that Claude Code announces to the model.
    """
    if block["type"] == "text":
        return block["text"]
    if block["type"] == "document":
        return images.left_out(block, place)
    if block["type"] == "image":
        file = block

        def source_of() -> tuple[str, str, tuple[str, ...]]:
            image, ignored = read(ImageBlock, file, place)
            return _data_of(image), "auto", ignored

        return images.result_piece(file, place, source_of)
    name = block["tool_name"]
    if name not in tools:
        return f"[The tool {name} is not available.]"
    return f"<function>{json.dumps(_function(tools[name]), ensure_ascii=False)}</function>"


def _answer_of(content: str | Sequence[AssistantBlock]) -> Message:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, thoughts, calls = list[str](), list[str](), list[Message]()
    for block in content:
        if block["type"] == "text":
            texts.append(block["text"])
        elif block["type"] == "thinking":
            thoughts.append(block["thinking"])
        elif block["type"] == "tool_use":
            function = {"name": block["name"], "arguments": block["input"]}
            calls.append({"id": block.get("id", ""), "type": "function", "function": function})
    found: Message = {"role": "assistant", "content": BETWEEN_PARTS.join(texts)}
    if any(thoughts):
        found["reasoning_content"] = BETWEEN_PARTS.join(thoughts)
    if calls:
        found["tool_calls"] = calls
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedMessage(Parsed):
    """The request for one message. `shows_thinking` is True if the answer contains the text of the thinking."""

    shows_thinking: bool


def parse_message(body: dict[str, Any], facts: ModelFacts, seed: int) -> ParsedMessage:
    """Convert the body of /v1/messages. `seed` is the default seed. Raises InvalidField."""
    given, ignored = read(MessageRequest, body)
    request, tools, in_vain, shows_thinking = _question(given, facts)
    wanted, seed = _format(given), seed_of(given, seed)
    if wanted is not None and tools.may_be_called:
        raise unsupported(wanted.origin, "cannot be combined with tools", hint='set tool_choice to {"type": "none"}')
    request = structs.replace(
        request,
        max_tokens=given["max_tokens"],
        stop=stops_of(given.get("stop_sequences")),
        sampling=replace(sampling_of(given, facts), seed=seed),
        response_format=wanted,
    )
    return ParsedMessage(
        requests=(request,),
        stream=given.get("stream", False),
        returns_progress=given.get("return_progress", False),
        ignored=(*in_vain, *ignored),
        seed=seed,
        shows_thinking=shows_thinking,
    )


def parse_count(body: dict[str, Any], facts: ModelFacts) -> Parsed:
    """Convert the body of /v1/messages/count_tokens to a request with the prompt to count. Raises InvalidField."""
    given, ignored = read(MessageCountRequest, body)
    request, _, in_vain, _ = _question(given, facts)
    _format(given)  # only checks the format, which is not part of the prompt
    return Parsed(requests=(request,), stream=False, ignored=(*in_vain, *ignored))


def _question(given: MessageCountRequest, facts: ModelFacts) -> tuple[Request, ToolOptions, tuple[str, ...], bool]:
    """Return a request without options, the tools, the ignored fields, and whether the answer contains thinking."""
    require_chats(facts)
    (messages, left_out), images = with_images(facts, lambda images: conversation_of(given, images))
    continues = messages[-1]["role"] == "assistant"  # the last message is the beginning of the answer
    tools = _tools(given, facts)
    if continues and tools.may_be_called:
        hint = 'end with a message of the role "user", or set tool_choice to {"type": "none"}'
        raise unsupported("messages", "an answer cannot be continued with tools", hint=hint)
    thinking, shows_thinking = _thinking(given, facts)
    prompt = ChatPrompt(
        messages, tools.tools, tools.choice, tools.parallel, not continues, thinking.variables, images.files
    )
    request = Request(prompt, think=thinking.think, think_budget=thinking.budget)
    without_effect = (*left_out, *thinking.without_effect, *images.ignored)
    return request, tools, (*tools.left_out, *without_effect), shows_thinking
