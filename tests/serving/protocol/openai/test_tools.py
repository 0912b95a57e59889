"""Tests of the tools of a request."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from llmrun.engine.requests import ChatPrompt
from llmrun.engine.tool_calls.schemas import read_tools
from tests.support.protocol.answers import FACTS, TOOL, chat
from tests.support.protocol.refusals import refused

FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds.",
        "parameters": {"type": "object"},
        "strict": True,
        "x_new": {"a": 1},
    },
}


def read(**fields: Any) -> ChatPrompt:
    prompt = chat(**{"tools": [TOOL, FIND], **fields}).requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def names(prompt: ChatPrompt) -> list[str]:
    return [tool["function"]["name"] for tool in prompt.tools or ()]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_definitions_reach_the_template_unchanged() -> None:
    prompt = read()
    assert [*(prompt.tools or ())] == [TOOL, FIND]
    assert (prompt.tool_choice, prompt.parallel_tool_calls) == ("auto", True)
    assert [tool.name for tool in read_tools(prompt.tools or ())] == ["look", "find"]


def test_null_is_left_out_of_definitions() -> None:
    tool = {"function": {"name": "look", "description": None, "parameters": None, "strict": None}}
    assert read(tools=[tool]).tools == [{"type": "function", "function": {"name": "look"}}]


@pytest.mark.parametrize("tools", [None, []])
def test_no_tools_are_none(tools: Any) -> None:
    assert read(tools=tools).tools is None
    assert read(tools=tools, tool_choice="none").tools is None


@pytest.mark.parametrize(
    ("choice", "wanted", "offered"),
    [
        ("none", "none", ["look", "find"]),
        ("required", "required", ["look", "find"]),
        (named("find"), "find", ["look", "find"]),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("find")]}},
            "required",
            ["find"],
        ),
        ({"type": "allowed_tools", "allowed_tools": {"tools": [named("look")]}}, "auto", ["look"]),
    ],
)
def test_every_choice_is_understood(choice: Any, wanted: str, offered: list[str]) -> None:
    prompt = read(tool_choice=choice)
    assert (prompt.tool_choice, names(prompt)) == (wanted, offered)


def test_parallel_calls_can_be_turned_off() -> None:
    assert not read(parallel_tool_calls=False).parallel_tool_calls


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("look", "tools"),
        ([5], "tools[0]"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "custom"}], "tools[0].custom"),
        ([{"type": "custom", "custom": {"name": "a b"}}], "tools[0].custom.name"),
        ([{"type": 5}], "tools[0].type"),
        ([{"function": {}}], "tools[0].function.name"),
        ([{"function": {"name": "two words"}}], "tools[0].function.name"),
        ([{"function": {"name": "x" * 129}}], "tools[0].function.name"),
        ([TOOL, TOOL], "tools[1].function.name"),
        ([{"function": {"name": "a", "description": 5}}], "tools[0].function.description"),
        ([{"function": {"name": "a", "parameters": []}}], "tools[0].function.parameters"),
        ([{"function": {"name": "a", "strict": "yes"}}], "tools[0].function.strict"),
        ([{"function": {"name": f"a{number}"}} for number in range(129)], "tools"),
    ],
)
def test_invalid_definitions_are_refused(tools: Any, param: str) -> None:
    refused(chat, param, tools=tools)


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("any", "tool_choice"),
        (5, "tool_choice"),
        ({}, "tool_choice.type"),
        (named("lost"), "tool_choice.function.name"),
        ({"type": "function"}, "tool_choice.function"),
        ({"type": "function", "function": {}}, "tool_choice.function.name"),
        ({"type": "custom", "custom": {"name": "a"}}, "tool_choice.custom.name"),
        ({"type": "web_search"}, "tool_choice.type"),
        (
            {"type": "allowed_tools", "allowed_tools": {"tools": [{"type": "web_search"}]}},
            "tool_choice.allowed_tools.tools[0].type",
        ),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        ({"type": "allowed_tools", "allowed_tools": {"tools": []}}, "tool_choice.allowed_tools.tools"),
        (
            {"type": "allowed_tools", "allowed_tools": {"tools": [named("lost")]}},
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "none"}}, "tool_choice.allowed_tools.mode"),
    ],
)
def test_invalid_choices_are_refused(choice: Any, param: str) -> None:
    refused(chat, param, tools=[TOOL], tool_choice=choice)


def test_a_tool_with_a_reserved_name_cannot_be_chosen() -> None:
    refused(chat, "tool_choice.function.name", tools=[named("auto")], tool_choice=named("auto"))


def test_a_required_call_needs_tools() -> None:
    refused(chat, "tool_choice", tool_choice="required")
    refused(chat, "tool_choice.function.name", tool_choice=named("look"))


def test_models_without_tools_refuse_them() -> None:
    facts = structs.replace(FACTS, takes_tools=False)
    refused(lambda: chat(facts, tools=[TOOL]), "tools", "unsupported_parameter")
    assert chat(facts, tools=[]).requests
