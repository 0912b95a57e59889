"""Converts the messages, the tools and the prompts of OpenAI's API to the engine's format."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard, cast

from llmrun.base.errors import ContextExceeded
from llmrun.engine.requests import AUTO, NONE, REQUIRED, FillPrompt, MixedPrompt, ModelFacts, TextPrompt, TokenPrompt
from llmrun.serving.protocol.declarations import read, seen
from llmrun.serving.protocol.errors import InvalidField, unsupported
from llmrun.serving.protocol.images import (
    BETWEEN_PARTS,
    ImagePart,
    Images,
    InputImagePart,
    Part,
    Piece,
    ResultFile,
    content_of,
)
from llmrun.serving.protocol.openai.custom_tools import custom_as_function, custom_definition
from llmrun.serving.protocol.openai.objects import (
    AssistantMessage,
    CustomChoice,
    CustomTool,
    Function,
    FunctionChoice,
    Message,
    PastCall,
    RefusalPart,
    TextPart,
    Tool,
    ToolFields,
)
from llmrun.serving.protocol.parsed import left_out_paths


def call_ids(messages: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Return the IDs of all tool calls in these messages."""
    calls = (call for message in messages for call in message.get("tool_calls") or ())
    return frozenset(call["id"] for call in calls if "id" in call)


def messages_of(messages: Iterable[Message], images: Images) -> tuple[dict[str, Any], ...]:
    """Return the messages of a ChatPrompt for the field `messages`, and add their images to `images`."""
    return tuple(message_of(message, images, f"messages[{number}]") for number, message in enumerate(messages))


def message_of(message: Message, images: Images, place: str) -> dict[str, Any]:
    """Return a message of a ChatPrompt. Only messages with images have a list of parts as content.

    place  the path of the message in the body
    """
    found: dict[str, Any] = {"role": message["role"]}
    match message["role"]:
        case "assistant":
            found |= _answer_of(message)
        case "tool":
            found["content"] = result_of(message.get("content", ""), images, f"{place}.content")
        case "user":
            found["content"] = _user_content(message["content"], images, f"{place}.content")
        case "system" | "developer":
            found = {"role": "system", "content": text_of(message["content"])}  # few templates support "developer"
    names: Mapping[str, Any] = message
    return found | {name: names[name] for name in ("name", "tool_call_id") if name in names}


def _answer_of(message: AssistantMessage) -> dict[str, Any]:
    content = text_of(message.get("content")) or message.get("refusal") or ""
    found: dict[str, Any] = {"content": content}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [*map(_call_of, calls)]
    if (thinking := message.get("reasoning_content", message.get("reasoning"))) is not None:
        found["reasoning_content"] = thinking
    return found


def _user_content(content: str | Sequence[TextPart | ImagePart | InputImagePart], images: Images, place: str) -> Any:
    if isinstance(content, str):
        return content
    return content_of(_user_piece(part, images, f"{place}[{number}]") for number, part in enumerate(content))


def _user_piece(part: TextPart | ImagePart | InputImagePart, images: Images, place: str) -> Piece:
    if part["type"] == "input_image" or part["type"] == "image_url":
        return images.part(*_source_of(part, place))
    return part["text"]


def _source_of(part: ImagePart | InputImagePart, place: str) -> tuple[str, str, str]:
    """Return the source of an image, the path of its field, and the detail."""
    if part["type"] == "input_image":
        return part["image_url"], f"{place}.image_url", part.get("detail", "auto")
    image = part["image_url"]
    if isinstance(image, str):
        return image, f"{place}.image_url", "auto"
    return image["url"], f"{place}.image_url.url", image.get("detail", "auto")


def result_of(content: str | Sequence[TextPart | ResultFile], images: Images, place: str) -> str | list[Part]:
    """Return the content of a tool's result, with notes in place of the files that the model cannot read.

    place  the path of the content in the body
    """
    if isinstance(content, str):
        return content
    return content_of(_result_piece(part, images, f"{place}[{number}]") for number, part in enumerate(content))


def _result_piece(part: TextPart | ResultFile, images: Images, place: str) -> Piece:
    kind = part["type"]
    if kind == "text" or kind == "input_text" or kind == "output_text":
        return cast("TextPart", part)["text"]
    if kind == "input_file":
        return images.left_out(part, place)
    declared: type[ImagePart] | type[InputImagePart] = ImagePart if kind == "image_url" else InputImagePart

    def source_of() -> tuple[str, str, tuple[str, ...]]:
        image, ignored = read(declared, part, place)
        source, _, detail = _source_of(image, place)
        return source, detail, ignored

    return images.result_piece(part, place, source_of)


def text_of(content: str | Sequence[TextPart | RefusalPart] | None) -> str | None:
    """Return a message's content, a string or a list of parts, as text, or None if there is no content."""
    if content is None or isinstance(content, str):
        return content
    return BETWEEN_PARTS.join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)


def _call_of(call: PastCall) -> dict[str, Any]:
    function = custom_as_function(call["custom"]) if call["type"] == "custom" else call["function"]
    arguments = function.get("arguments") or "{}"
    found = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **found} if "id" in call else found


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """The tools of a ChatPrompt. The class ChatPrompt describes the first three fields.

    left_out  the paths of the tools that only other servers can run, for the response header
    """

    tools: Sequence[Mapping[str, Any]] | None
    choice: str
    parallel: bool
    left_out: tuple[str, ...] = ()

    @property
    def may_be_called(self) -> bool:
        return self.tools is not None and self.choice != NONE


def tools_of(given: ToolFields, facts: ModelFacts) -> ToolOptions:
    """Convert `tools`, `tool_choice` and `parallel_tool_calls`. Raises InvalidField."""
    listed = given.get("tools", ())
    defined = [_definition(tool, f"tools[{number}]") for number, tool in enumerate(listed) if _is_supported(tool)]
    options = _chosen(given, definitions_of(defined, facts))
    return replace(options, left_out=left_out_paths(tool["type"] for tool in listed if not _is_supported(tool)))


def _is_supported(tool: Mapping[str, object]) -> TypeGuard[Tool | CustomTool]:
    return tool["type"] in ("function", "custom")


def _definition(tool: Tool | CustomTool, place: str) -> tuple[str, Mapping[str, Any]]:
    """Return the path of a tool's name, and the tool in the form of a ChatPrompt. Raises InvalidField."""
    if tool["type"] == "function":
        return f"{place}.function.name", function_definition(tool["function"])
    custom = tool["custom"]
    wanted = custom.get("format")
    grammar = wanted["grammar"] if wanted is not None and wanted["type"] == "grammar" else None
    return f"{place}.custom.name", custom_definition(custom["name"], custom.get("description"), grammar)


def function_definition(function: Function) -> Mapping[str, Any]:
    """Return the definition of a function, in the form of a ChatPrompt."""
    return {"type": "function", "function": function}


def _chosen(given: ToolFields, tools: Mapping[str, Mapping[str, Any]]) -> ToolOptions:
    parallel, choice = given.get("parallel_tool_calls", True), given.get("tool_choice", AUTO)
    if isinstance(choice, str):
        return unnamed_choice(tools, choice, parallel)
    if choice["type"] != "allowed_tools":
        kind, name = _named(choice)
        return ToolOptions([*tools.values()], chosen_tool(name, f"tool_choice.{kind}.name", tools), parallel)
    allowed = choice["allowed_tools"]
    named = [_named(each) for each in allowed["tools"]]
    paths = [f"tool_choice.allowed_tools.tools[{number}].{kind}.name" for number, (kind, _) in enumerate(named)]
    return allowed_tools(tools, [name for _, name in named], paths, allowed.get("mode", AUTO), parallel)


def _named(choice: FunctionChoice | CustomChoice) -> tuple[str, str]:
    """Return the kind and the name of a tool to call."""
    return (
        ("custom", choice["custom"]["name"]) if choice["type"] == "custom" else ("function", choice["function"]["name"])
    )


def definitions_of(defined: Iterable[tuple[str, Mapping[str, Any]]], facts: ModelFacts) -> dict[str, Mapping[str, Any]]:
    """Return the definitions of tools by name. Raises InvalidField.

    defined  the path of each tool's name, and the tool in the form of a ChatPrompt
    """
    tools: dict[str, Mapping[str, Any]] = {}
    for path, tool in defined:
        if (name := tool["function"]["name"]) in tools:
            raise InvalidField(path, f"two tools have the name {name}")
        tools[name] = tool
    if tools and not facts.takes_tools:
        raise unsupported("tools", "this model does not support tools", hint="use a model trained to call tools")
    return tools


def unnamed_choice(tools: Mapping[str, Mapping[str, Any]], choice: str, parallel: bool) -> ToolOptions:
    """Return the options for the choice none, auto or required. Raises InvalidField for required without tools."""
    if choice == REQUIRED and not tools:
        raise InvalidField("tool_choice", "a tool call is required, but there are no tools")
    return ToolOptions([*tools.values()] or None, choice, parallel)


def chosen_tool(name: str, path: str, tools: Container[str]) -> str:
    """Check the name of the tool to call, and return the name. Raises InvalidField for the field at `path`."""
    _check_known(name, path, tools)
    if name in (NONE, AUTO, REQUIRED):
        raise unsupported(path, f"a tool with the name {name} cannot be chosen")
    return name


def allowed_tools(
    tools: Mapping[str, Mapping[str, Any]], names: Sequence[str], paths: Sequence[str], mode: str, parallel: bool
) -> ToolOptions:
    """Return the options for a choice that allows some of the tools. `paths` are the paths of the names' fields."""
    for name, path in zip(names, paths, strict=True):
        _check_known(name, path, tools)
    return ToolOptions([tool for name, tool in tools.items() if name in names], mode, parallel)


def _check_known(name: str, path: str, tools: Container[str]) -> None:
    if name not in tools:
        raise InvalidField(path, f"no tool has the name {seen(name)}")


def prompts_of(
    value: str | Sequence[str | Sequence[int] | int], name: str, facts: ModelFacts
) -> tuple[TextPrompt | TokenPrompt, ...]:
    """Return the text prompts and token prompts in a field. Raises InvalidField for unknown tokens."""
    if isinstance(value, str):
        return (TextPrompt(value),)
    if isinstance(value[0], int):
        return (_tokens(value, name, facts),)
    return tuple(
        TextPrompt(each) if isinstance(each, str) else _tokens(each, f"{name}[{number}]", facts)
        for number, each in enumerate(value)
    )


def check_lengths(prompts: Iterable[TextPrompt | TokenPrompt | MixedPrompt], facts: ModelFacts) -> None:
    """Raise ContextExceeded for lists of tokens that exceed the context.

    The server itself checks the lengths, because sending millions of numbers to the engine's process would hold up all
    other requests.
    """
    longest = max(map(_least_tokens, prompts), default=0)
    if longest >= facts.info.context_size:
        raise ContextExceeded.by_prompt(longest, facts.info.context_size, hint="shorten the prompt")


def _least_tokens(prompt: TextPrompt | TokenPrompt | MixedPrompt) -> int:
    """Return how many tokens a prompt has at least. Each text in a list has at least one."""
    if isinstance(prompt, MixedPrompt):
        return sum(bool(part) if isinstance(part, str) else len(part) for part in prompt.parts)
    return len(prompt.tokens) if isinstance(prompt, TokenPrompt) else 0


def filled(prompt: TextPrompt | TokenPrompt, suffix: str, facts: ModelFacts) -> FillPrompt:
    """Return the prompt for filling the gap between a prompt and a suffix. Raises InvalidField."""
    require_filling(facts, "suffix")
    if isinstance(prompt, TokenPrompt):
        raise unsupported("suffix", "supported only for prompts that are text")
    return FillPrompt(prompt.text, suffix)


def require_filling(facts: ModelFacts, param: str) -> None:
    """Raise InvalidField for the field `param` if the model does not support fill-in-the-middle."""
    if not facts.fills:
        raise unsupported(param, "this model cannot fill in the middle", hint="its vocabulary lacks tokens for filling")


def check_tokens(ids: Sequence[int], place: str, facts: ModelFacts) -> None:
    """Raise InvalidField if a list contains a token ID that is not in the vocabulary."""
    size = facts.info.vocabulary_size
    if max(ids, default=0) >= size:
        number = next(number for number, token in enumerate(ids) if token >= size)
        words = f"expected a token ID from 0 to {size - 1}, got {ids[number]}"
        raise InvalidField(f"{place}[{number}]", words)


def _tokens(ids: Any, place: str, facts: ModelFacts) -> TokenPrompt:
    check_tokens(ids, place, facts)
    return TokenPrompt(tuple(ids))
