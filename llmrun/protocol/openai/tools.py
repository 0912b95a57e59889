"""Reads the tools of a request and which of them the model may call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llmrun.engine.facts import ModelFacts
from llmrun.engine.requests import AUTO, NONE, REQUIRED
from llmrun.protocol.errors import InvalidField, unsupported
from llmrun.protocol.fields import Fields, missing, seen

MOST_TOOLS: Final = 128  # as in OpenAI's API
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_WORDS: Final = (NONE, AUTO, REQUIRED)
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


def read_tools(fields: Fields, facts: ModelFacts) -> ToolOptions:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`. Raises InvalidField."""
    tools = _read_definitions(fields)
    if tools and not facts.takes_tools:
        raise unsupported("tools", "this model does not support tools", hint="use a model that was trained for them")
    parallel = fields.boolean("parallel_tool_calls")
    choice, allowed = _read_choice(fields, tools)
    chosen = [tool for name, tool in tools.items() if name in allowed]
    return ToolOptions(chosen or None, choice, parallel is not False)


def _read_definitions(fields: Fields) -> dict[str, Mapping[str, Any]]:
    """Return the definitions of tools by name."""
    given = fields.item_fields("tools") or []
    if len(given) > MOST_TOOLS:
        raise InvalidField("tools", f"{len(given):,} tools are too many; the limit is {MOST_TOOLS}")
    tools: dict[str, Mapping[str, Any]] = {}
    for tool in given:
        if tool.word("type", ("function", "custom")) == "custom":
            raise unsupported(tool.path("type"), _FUNCTIONS_ONLY)
        definition = tool.object("function")
        if definition is None:
            raise missing(tool.path("function"))
        function = Fields(definition, tool.path("function"))  # the template gets all of them
        name = function.needed_text("name")
        if not _NAME.fullmatch(name):
            words = f"expected 1 to 64 letters, digits, underscores and hyphens, got {seen(name)}"
            raise InvalidField(function.path("name"), words)
        if name in tools:
            raise InvalidField(function.path("name"), f"two tools have the name {name}")
        function.text("description")
        function.object("parameters")
        function.boolean("strict")
        kept = {key: value for key, value in definition.items() if value is not None}
        tools[name] = {"type": "function", "function": kept}
    return tools


def _read_choice(fields: Fields, tools: Mapping[str, object]) -> tuple[str, frozenset[str]]:
    """Return `tool_choice` in the form of ChatPrompt, and the names of the tools that may be called."""
    everything = frozenset(tools)
    value = fields.value("tool_choice")
    if value is None:
        return AUTO, everything
    if type(value) is str:
        if value not in _WORDS:
            raise fields.wrong("tool_choice", "one of none, auto, required, or an object")
        if value == REQUIRED and not tools:
            raise InvalidField("tool_choice", "a tool call is required, but there are no tools")
        return value, everything
    choice = fields.fields("tool_choice")
    kind = choice.text("type") if choice is not None else None
    if choice is None or kind is None:
        raise missing("tool_choice.type")
    if kind == "allowed_tools":
        return _read_allowed(choice, tools)
    if kind != "function":
        raise unsupported("tool_choice.type", _FUNCTIONS_ONLY)
    name = _read_name(choice, tools)
    if name in _WORDS:
        raise unsupported("tool_choice.function.name", f"a tool with the name {name} cannot be chosen")
    return name, everything


def _read_allowed(choice: Fields, tools: Mapping[str, object]) -> tuple[str, frozenset[str]]:
    """Read a choice among some of the tools."""
    allowed = choice.fields("allowed_tools")
    if allowed is None:
        raise missing(choice.path("allowed_tools"))
    mode = allowed.word("mode", (AUTO, REQUIRED)) or AUTO
    names = frozenset(_read_name(item, tools) for item in allowed.item_fields("tools") or ())
    if not names:
        raise InvalidField(allowed.path("tools"), "expected at least one tool")
    return mode, names


def _read_name(reference: Fields, tools: Mapping[str, object]) -> str:
    """Return the name of the tool that {"type": "function", "function": {"name": ...}} refers to."""
    reference.word("type", ("function",))
    function = reference.fields("function")
    if function is None:
        raise missing(reference.path("function"))
    name = function.needed_text("name")
    if name not in tools:
        raise InvalidField(function.path("name"), f"no tool has the name {seen(name)}")
    return name
