"""Reads the tools of Anthropic's API and which of them the model may call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from llmrun.engine.facts import ModelFacts
from llmrun.engine.requests import AUTO, NONE, REQUIRED
from llmrun.serving.protocol.errors import unsupported
from llmrun.serving.protocol.fields import Fields, missing, seen
from llmrun.serving.protocol.openai.tools import (
    ToolOptions,
    check_any,
    check_takes_tools,
    read_chosen,
    read_definition,
    read_list,
)

CHOICES: Final = ("auto", "any", "tool", "none")
_SCHEMA: Final = "input_schema"
_QUIET: Final = ("cache_control", "eager_input_streaming")  # prefixes are cached and arguments streamed anyway


def read_tools(fields: Fields, facts: ModelFacts) -> ToolOptions:
    """Read `tools` and `tool_choice`. Raises InvalidField."""
    tools: dict[str, Mapping[str, Any]] = {}
    for tool in read_list(fields):
        kind = tool.text("type")
        if kind not in (None, "custom"):
            hint = f"define a tool with a name and its {_SCHEMA}"
            raise unsupported(tool.path("type"), f"only custom tools are supported, got {seen(kind)}", hint=hint)
        name = read_definition(tool, _SCHEMA, tools)
        if tool.peek(_SCHEMA) is None:
            raise missing(tool.path(_SCHEMA))
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
    kind = choice.word("type", CHOICES)
    if kind is None:
        raise missing(choice.path("type"))
    if kind == "tool":
        return read_chosen(choice, tools), parallel
    if kind == "any":
        check_any(tools)
    return {"auto": AUTO, "any": REQUIRED, "none": NONE}[kind], parallel
