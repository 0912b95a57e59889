"""Tests of tools and tool_choice in Anthropic's form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import structs

from llmrun.engine.requests import ChatPrompt
from llmrun.serving.protocol.errors import InvalidField
from tests.support.protocol.answers import FACTS
from tests.support.protocol.anthropic_answers import TOOL, USER, message, prompt_of


def test_a_tool_has_the_form_of_chat_completions() -> None:
    described = {**TOOL, "type": "custom", "description": "Looks.", "strict": True, "cache_control": {}}
    function = {"name": "look", "description": "Looks.", "strict": True, "parameters": TOOL["input_schema"]}
    assert prompt_of(tools=[described]).tools == [{"type": "function", "function": function}]
    assert message(tools=[described]).ignored == ()


def test_fields_of_tools_without_effect_are_named() -> None:
    assert message(tools=[{**TOOL, "allowed_callers": ["direct"]}]).ignored == ("tools[].allowed_callers",)


LATER = {**TOOL, "name": "later", "description": "Waits.", "defer_loading": True}
OWN_SEARCH = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}


def after_a_search(*names: str) -> list[dict[str, Any]]:
    """Return a conversation in which the tool `look` has found tools."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    found = [{"type": "tool_reference", "tool_name": name} for name in names]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": found}
    return [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


def names_of(**fields: Any) -> list[tuple[str, bool]]:
    """Return the names of the tools, and whether they are deferred."""
    return [(tool["function"]["name"], tool.get("deferred", False)) for tool in prompt_of(**fields).tools or ()]


def test_deferred_tools_can_be_called_after_a_result_refers_to_them() -> None:
    """The list of tools in the prompt stays the same, so that the cached prefix is used."""
    tools = [LATER, TOOL, {**LATER, "name": "never"}]
    assert names_of(tools=tools) == [("look", False)]
    assert names_of(tools=tools, messages=after_a_search("later")) == [("later", True), ("look", False)]
    assert message(tools=tools).ignored == ()


def test_references_become_definitions() -> None:
    result = prompt_of(tools=[TOOL, LATER], messages=after_a_search("later", "gone")).messages[-1]
    definition = {"name": "later", "description": "Waits.", "parameters": TOOL["input_schema"]}
    assert result["content"] == f"<function>{json.dumps(definition)}</function>\n[The tool gone is not available.]"


@pytest.mark.parametrize("tools", [[LATER], [LATER, OWN_SEARCH]])
def test_tools_that_no_search_can_find_are_not_deferred(tools: list[dict[str, Any]]) -> None:
    assert names_of(tools=tools) == [("later", False)]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", True)),
        ({"type": "auto"}, ("auto", True)),
        ({"type": "any"}, ("required", True)),
        ({"type": "none"}, ("none", True)),
        ({"type": "tool", "name": "look"}, ("look", True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", False)),
        ({"type": "any", "disable_parallel_tool_use": False}, ("required", True)),
    ],
)
def test_choices_are_converted(choice: Any, expected: tuple[str, bool]) -> None:
    prompt = prompt_of(tools=[TOOL], tool_choice=choice)
    assert (prompt.tool_choice, prompt.parallel_tool_calls) == expected


@pytest.mark.parametrize("name", ["x" * 128, "mcp__server__tool-1", "math.add"])
def test_long_names_are_allowed(name: str) -> None:
    tools = prompt_of(tools=[{**TOOL, "name": name}]).tools
    assert tools is not None
    assert tools[0]["function"]["name"] == name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": TOOL}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search_20250305"}], "tool_choice": {"type": "any"}}, "tool_choice"),
        (
            {
                "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
                "tool_choice": {"type": "tool", "name": "web_search"},
            },
            "tool_choice.name",
        ),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "name": "x" * 129}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{**TOOL, "input_schema": True}]}, "tools[0].input_schema"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {}}, "tool_choice.type"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "find"}}, "tool_choice.name"),
        ({"tools": [{**TOOL, "name": "auto"}], "tool_choice": {"type": "tool", "name": "auto"}}, "tool_choice.name"),
    ],
)
def test_invalid_tools_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidField) as caught:
        message(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("kind", ["web_search_20250305", "bash_20250124", "mcp_toolset"])
def test_tools_of_anthropic_are_left_out(kind: str) -> None:
    parsed = message(tools=[{"type": kind, "name": "x", "max_uses": 5}, TOOL, {"type": kind, "name": "y"}])
    prompt = parsed.request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert [tool["function"]["name"] for tool in prompt.tools or ()] == [TOOL["name"]]
    assert parsed.ignored == (f"tools.{kind}",)


def test_models_without_tools_refuse_them() -> None:
    with pytest.raises(InvalidField, match="does not support tools"):
        message(structs.replace(FACTS, takes_tools=False), tools=[TOOL])
