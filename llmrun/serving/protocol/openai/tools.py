"""Reads the tools of a request and which of them the model may call."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llmrun.engine.facts import ModelFacts
from llmrun.engine.requests import AUTO, LONGEST_TOOL_NAME, NONE, REQUIRED
from llmrun.serving.protocol.errors import InvalidField, unsupported
from llmrun.serving.protocol.fields import Fields, missing, seen

MOST_TOOLS: Final = 128  # as in OpenAI's API
NAME: Final = rf"[a-zA-Z0-9_-]{{1,{LONGEST_TOOL_NAME}}}"
_WORDS: Final = (NONE, AUTO, REQUIRED)
_FUNCTION_FIELDS: Final = ("name", "description", "parameters", "strict")
_FUNCTIONS_ONLY: Final = "only functions are supported"


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """The tools of a ChatPrompt, which describes the fields."""

    tools: Sequence[Mapping[str, Any]] | None
    choice: str
    parallel: bool

    @property
    def may_be_called(self) -> bool:
        return self.tools is not None and self.choice != NONE


def read_tools(fields: Fields, facts: ModelFacts, *, flat: bool = False) -> ToolOptions:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`. Raises InvalidField.

    flat  whether they have the form of the Responses API, where a function is not an object inside the tool
    """
    tools = _read_definitions(fields, flat)
    check_takes_tools(tools, facts)
    parallel = fields.boolean("parallel_tool_calls")
    choice, allowed = _read_choice(fields, tools, flat)
    chosen = [tool for name, tool in tools.items() if name in allowed]
    return ToolOptions(chosen or None, choice, parallel is not False)


def read_list(fields: Fields) -> Sequence[Fields]:
    """Return the items of `tools`. Raises InvalidField."""
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
    """Raise InvalidField if there are tools but the model does not support them."""
    if tools and not facts.takes_tools:
        raise unsupported("tools", "this model does not support tools", hint="use a model that was trained for them")


def read_reference(reference: Fields, tools: Container[str]) -> str:
    """Return the name of the tool to which the field `name` refers. Raises InvalidField."""
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
        # Templates also get the unknown fields of an object `function`, but not those of a tool.
        tools[name] = {"type": "function", "function": function.given(_FUNCTION_FIELDS if flat else None)}
    return tools


def _nested(tool: Fields) -> Fields:
    """Return the fields of the object `function`."""
    function = tool.fields("function")
    if function is None:
        raise missing(tool.path("function"))
    return function


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
    choice = fields.fields("tool_choice")
    kind = choice.text("type") if choice is not None else None
    if choice is None or kind is None:
        raise missing("tool_choice.type")
    if kind == "allowed_tools":
        return _read_allowed(choice, tools, flat)
    if kind != "function":
        raise unsupported("tool_choice.type", _FUNCTIONS_ONLY)
    return read_chosen(_function_of(choice, flat), tools), everything


def _read_allowed(choice: Fields, tools: Mapping[str, object], flat: bool) -> tuple[str, frozenset[str]]:
    """Read a choice among some of the tools."""
    allowed = choice if flat else choice.fields("allowed_tools")
    if allowed is None:
        raise missing(choice.path("allowed_tools"))
    mode = allowed.word("mode", (AUTO, REQUIRED)) or AUTO
    names = frozenset(read_reference(_function_of(item, flat), tools) for item in allowed.item_fields("tools") or ())
    if not names:
        raise InvalidField(allowed.path("tools"), "expected at least one tool")
    return mode, names


def _function_of(reference: Fields, flat: bool) -> Fields:
    """Return the fields with the name in {"type": "function", "function": {"name": ...}}, or in its flat form."""
    reference.word("type", ("function",))
    return reference if flat else _nested(reference)
