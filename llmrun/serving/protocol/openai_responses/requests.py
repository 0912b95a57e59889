"""Converts the body of a call of the Responses API into a request for the engine.

The items of the conversation become the messages of a ChatPrompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeGuard, cast

from msgspec import structs

from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.requests import AUTO, ModelFacts, Request, ToolCall
from llmrun.serving.protocol.declarations import missing, read
from llmrun.serving.protocol.errors import InvalidField
from llmrun.serving.protocol.images import BETWEEN_PARTS, Images, with_images
from llmrun.serving.protocol.openai.custom_tools import custom_arguments, custom_definition
from llmrun.serving.protocol.openai.messages import (
    ToolOptions,
    allowed_tools,
    chosen_tool,
    definitions_of,
    function_definition,
    message_of,
    result_of,
    unnamed_choice,
)
from llmrun.serving.protocol.openai.objects import Function, OtherTool
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
    SUPPORTED_ITEMS,
    CalledTool,
    CallItem,
    ResponseNamespace,
    ResponseRequest,
    ResponseTool,
    Settings,
    SupportedItem,
    SupportedTool,
    TextFormat,
    ToolsItem,
)
from llmrun.serving.protocol.parsed import Parsed, left_out_paths

_THINKING: Final = "reasoning_content"
_TEXTS: Final = ("content", _THINKING)
_BETWEEN_SYSTEM_MESSAGES: Final = "\n\n"
_MOST_TOOLS: Final = 1024  # including the tools in namespaces; the grammar for so many tools compiles in 2 s
_ANY_TEXT: Final[TextFormat] = {"type": "text"}


def conversation_of(given: ResponseRequest, images: Images) -> tuple[Mapping[str, Any], ...]:
    """Return the messages of `instructions` and `input`. Raises InvalidField if no item of `input` is a message.

    The images of the messages are added to `images`.
    Some clients probe servers with an empty `input`, which counts as an empty message.
    """
    conversation = _Conversation(images)
    instructions, items = given.get("instructions"), given["input"]
    if instructions:
        conversation.add({"role": "system", "content": instructions})
    if isinstance(items, str) or not items:
        conversation.add({"role": "user", "content": items or ""})
    else:
        for number, item in enumerate(items):
            if _is_supported_item(item):
                conversation.add_item(item, f"input[{number}]")
    if len(conversation.messages) == bool(instructions):
        raise InvalidField("input", "expected at least one message, got only items without text")
    return conversation.joined()


def _is_supported_item(item: Mapping[str, object]) -> TypeGuard[SupportedItem]:
    return item["type"] in SUPPORTED_ITEMS


class _Conversation:
    """The messages of a conversation so far.

    An answer of the Responses API consists of several items: thinking, text, and tool calls. In a chat, these items
    form one message. Texts that can still grow are stored as lists of parts, because appending to a long string
    repeatedly takes quadratic time.
    """

    def __init__(self, images: Images) -> None:
        self.messages: list[dict[str, Any]] = []
        self._images = images

    def add_item(self, item: SupportedItem, place: str) -> None:
        """Add an item of the input. `place` is its path in the body."""
        if item["type"] == "reasoning":
            content = item.get("content", "")
            text = content if isinstance(content, str) else BETWEEN_PARTS.join(part["text"] for part in content)
            if text:
                self.add_thinking(text)
        elif item["type"] == "function_call":
            self._add_call(item, item["arguments"] or "{}")
        elif item["type"] == "custom_tool_call":
            self._add_call(item, custom_arguments(item["input"]))
        elif item["type"] == "function_call_output" or item["type"] == "custom_tool_call_output":
            result = result_of(item["output"], self._images, f"{place}.output")
            self.add({"role": "tool", "content": result, "tool_call_id": item.get("call_id", "")})
        elif item["type"] == "message":
            message = message_of(item, self._images, place)
            (self.add_answer if message["role"] == "assistant" else self.add)(message)

    def _add_call(self, item: CallItem, arguments: str) -> None:
        call = ToolCall(item.get("call_id", ""), offered_name(item["name"], item.get("namespace", "")), arguments)
        self._answer().setdefault("tool_calls", []).append(call.as_message())

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
    if message["role"] not in ("system", "assistant"):  # their content may be a list of texts and images
        return message
    return {**message, **{name: "".join(message[name]) for name in _TEXTS if type(message.get(name)) is list}}


def _tools(given: ResponseRequest, facts: ModelFacts) -> ToolOptions:
    """Return the tools and the choice of tools. Raises InvalidField."""
    listed = [*_listed(given)]
    if len(listed) > _MOST_TOOLS:
        raise InvalidField("tools", f"{len(listed):,} tools are too many; the limit is {_MOST_TOOLS:,}")
    defined = [_definition(tool, namespace, place) for tool, namespace, place in listed if _is_supported(tool)]
    options = _chosen(given, definitions_of(defined, facts))
    left_out = left_out_paths(tool["type"] for tool, *_ in listed if not _is_supported(tool))
    return replace(options, left_out=left_out)


def _listed(given: ResponseRequest) -> Iterator[tuple[SupportedTool | OtherTool, str, str]]:
    """Yield each tool with its namespace, or "", and its path."""
    for place, tool in _with_places(given):
        if _is_namespace(tool):
            for index, inner in enumerate(tool["tools"]):
                yield inner, tool["name"], f"{place}.tools[{index}]"
        else:
            yield cast("SupportedTool | OtherTool", tool), "", place


def _with_places(given: ResponseRequest) -> Iterator[tuple[str, SupportedTool | ResponseNamespace | OtherTool]]:
    """Yield the path and the definition of each tool in `tools` and in the items `additional_tools`."""
    for number, tool in enumerate(given.get("tools", ())):
        yield f"tools[{number}]", tool
    items = given["input"]
    for index, item in enumerate(() if isinstance(items, str) else items):
        if item["type"] == "additional_tools":
            for number, tool in enumerate(cast("ToolsItem", item)["tools"]):
                yield f"input[{index}].tools[{number}]", tool


def _is_namespace(tool: Mapping[str, object]) -> TypeGuard[ResponseNamespace]:
    return tool["type"] == "namespace"


def _is_supported(tool: Mapping[str, object]) -> TypeGuard[SupportedTool]:
    return tool["type"] in ("function", "custom")


def _definition(tool: SupportedTool, namespace: str, place: str) -> tuple[str, Mapping[str, Any]]:
    """Return the path of a tool's name, and the tool in the form of a ChatPrompt. Raises InvalidField."""
    name, path = offered_name(tool["name"], namespace), f"{place}.name"
    if tool["type"] == "custom":
        wanted = tool.get("format")
        grammar = wanted if wanted is not None and wanted["type"] == "grammar" else None
        return path, custom_definition(name, tool.get("description"), grammar)
    function = {**tool, "name": name}
    del function["type"]
    return path, function_definition(cast("Function", function))


def offered_name(name: str, namespace: str) -> str:
    """Return the name that the model sees: NAMESPACE__NAME. Codex's namespaces of MCP servers already end with "__"."""
    return f"{namespace}{'' if not namespace or namespace.endswith('__') else '__'}{name}"


def _names(given: ResponseRequest) -> dict[str, CalledTool]:
    """Map the names that the model sees to names with a namespace, for the tools in namespaces."""
    inside = [(tool["name"], namespace) for tool, namespace, _ in _listed(given) if namespace and _is_supported(tool)]
    return {offered_name(name, namespace): {"name": name, "namespace": namespace} for name, namespace in inside}


def _chosen(given: ResponseRequest, tools: Mapping[str, Mapping[str, Any]]) -> ToolOptions:
    parallel, choice = given.get("parallel_tool_calls", True), given.get("tool_choice", AUTO)
    if isinstance(choice, str):
        return unnamed_choice(tools, choice, parallel)
    if choice["type"] != "allowed_tools":
        name = offered_name(choice["name"], choice.get("namespace", ""))
        return ToolOptions([*tools.values()], chosen_tool(name, "tool_choice.name", tools), parallel)
    names = [offered_name(each["name"], each.get("namespace", "")) for each in choice["tools"]]
    paths = [f"tool_choice.tools[{number}].name" for number in range(len(names))]
    return allowed_tools(tools, names, paths, choice.get("mode", AUTO), parallel)


def _format(wanted: TextFormat) -> Iterator[ResponseFormat]:
    """Yield the format in `text.format`, unless it allows any text."""
    if wanted["type"] == "json_schema" and "schema" not in wanted:
        raise missing("text.format.schema")
    if wanted["type"] != "text" and "schema" in wanted:
        yield structs.replace(
            json_schema_format(wanted["schema"], "text.format.schema"), strict=wanted.get("strict", False)
        )
    elif wanted["type"] == "json_object":
        yield ResponseFormat(FormatKind.JSON_OBJECT, origin="text.format")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedResponse(Parsed):
    """A parsed call, which consists of a single request.

    settings  the settings that the answer repeats
    names     maps the names that the model sees to names with a namespace, for the tools in namespaces
    """

    settings: Settings
    names: Mapping[str, CalledTool]


def parse_response(body: dict[str, Any], facts: ModelFacts, seed: int) -> ParsedResponse:
    """Convert the body of a call of /v1/responses. `seed` is the default seed. Raises InvalidField."""
    given, ignored = read(ResponseRequest, body)
    require_chats(facts, "input")
    messages, images = with_images(facts, lambda images: conversation_of(given, images))
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
    request = chat_request(messages, tools, thinking, options, images)
    others = (f"include.{name}" for name in included if name != LOGPROBS)
    return ParsedResponse(
        requests=(request,),
        stream=options.stream,
        returns_progress=given.get("return_progress", False),
        seed=options.seed,
        settings=_settings(given, request, tools),
        names=_names(given),
        ignored=(
            *(*tools.left_out, *thinking.without_effect, *others),
            *(*_left_out_items(given), *images.ignored, *ignored),
        ),
    )


def _left_out_items(given: ResponseRequest) -> list[str]:
    """Return `input.TYPE` for each type of item that only other servers write."""
    items = given["input"]
    others = [] if isinstance(items, str) else [item["type"] for item in items if not _is_supported_item(item)]
    return [f"input.{kind}" for kind in dict.fromkeys(others)]


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
        "tools": [*_shown_tools(given.get("tools", ()))],
        "top_logprobs": request.logprobs or 0,
        "truncation": "disabled",
        "user": given.get("user"),
        "safety_identifier": given.get("safety_identifier"),
        "prompt_cache_key": given.get("prompt_cache_key"),
    }


def _shown(wanted: TextFormat) -> TextFormat:
    return {"name": "", "description": None, "strict": False, **wanted} if "schema" in wanted else wanted


def _shown_tools(
    tools: Sequence[SupportedTool | ResponseNamespace | OtherTool],
) -> Iterator[SupportedTool | ResponseNamespace]:
    """Yield the tools that were not left out, with defaults for missing fields."""
    for tool in tools:
        if _is_namespace(tool):
            inner = cast("list[SupportedTool]", [*_shown_tools(tool["tools"])])
            yield {"description": "", **tool, "tools": [*inner]}
        elif tool["type"] == "function":
            yield {"description": None, "parameters": None, "strict": None, **cast("ResponseTool", tool)}
        elif _is_supported(tool):
            yield tool
