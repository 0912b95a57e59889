"""Tests of namespaces and custom tools of the Responses API."""

from __future__ import annotations

from typing import Any

import pytest

from llmrun.base.types import FinishReason
from llmrun.engine.requests import ChatPrompt, Event, ToolCallDelta
from llmrun.serving.protocol.openai_responses.objects import Response, ResponseEvent
from tests.support.protocol.answers import called, ended
from tests.support.protocol.openapi import validate
from tests.support.protocol.refusals import refused
from tests.support.protocol.response_answers import FLAT_TOOL, answered, response, response_answer, streamed

GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"+'}
PATCH = {"type": "custom", "name": "patch", "format": GRAMMAR}
FILES = {"type": "namespace", "name": "files", "description": "Files", "tools": [FLAT_TOOL, {"type": "mcp"}, PATCH]}
SERVER = {"type": "namespace", "name": "mcp__docs__", "tools": [{"name": "find.all", "parameters": {}}]}
TOOLS = [FLAT_TOOL, {"type": "web_search", "external_web_access": False}, FILES, SERVER, PATCH]
MORE = {"type": "additional_tools", "role": "developer", "tools": [FILES, {"type": "web_search"}]}


def prompt_of(**fields: Any) -> ChatPrompt:
    prompt = response(**fields).request.prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def names(prompt: ChatPrompt) -> list[str]:
    return [tool["function"]["name"] for tool in prompt.tools or ()]


def test_tools_in_namespaces_are_offered_with_longer_names() -> None:
    parsed = response(tools=TOOLS)
    assert isinstance(parsed.request.prompt, ChatPrompt)
    assert names(parsed.request.prompt) == ["look", "files__look", "files__patch", "mcp__docs__find.all", "patch"]
    assert parsed.ignored == ("tools.web_search", "tools.mcp")


def test_items_may_contain_more_tools() -> None:
    parsed = response(tools=[FLAT_TOOL], input=[MORE, {"role": "user", "content": "Hi"}])
    assert isinstance(parsed.request.prompt, ChatPrompt)
    assert names(parsed.request.prompt) == ["look", "files__look", "files__patch"]
    assert [*parsed.request.prompt.messages] == [{"role": "user", "content": "Hi"}]
    assert parsed.ignored == ("tools.mcp", "tools.web_search")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [FILES, {**FLAT_TOOL, "name": "files__look"}]}, "tools[1].name"),
        ({"tools": [{**FILES, "tools": [FLAT_TOOL, FLAT_TOOL]}]}, "tools[0].tools[1].name"),
        ({"tools": [{**FILES, "tools": [FILES]}], "tool_choice": "required"}, "tool_choice"),
        ({"input": [{**MORE, "tools": [{"type": "custom"}]}]}, "input[0].tools[0].name"),
        ({"tools": [{**FILES, "name": f"n{each}", "tools": [PATCH] * 128} for each in range(9)]}, "tools"),
        ({"tools": [{**PATCH, "format": {**GRAMMAR, "syntax": "x"}}]}, "tools[0].format.syntax"),
    ],
)
def test_invalid_tools_are_refused_with_their_place(fields: dict[str, Any], param: str) -> None:
    refused(response, param, **fields)


@pytest.mark.parametrize(
    ("choice", "wanted", "offered"),
    [
        ({"type": "custom", "name": "patch"}, "patch", 5),
        ({"type": "function", "name": "look", "namespace": "files"}, "files__look", 5),
        (
            {"type": "allowed_tools", "tools": [{"name": "look"}, {"type": "custom", "name": "patch"}]},
            "auto",
            2,
        ),
    ],
)
def test_every_tool_can_be_chosen(choice: Any, wanted: str, offered: int) -> None:
    prompt = prompt_of(tools=TOOLS, tool_choice=choice)
    assert (prompt.tool_choice, len(prompt.tools or ())) == (wanted, offered)


def calls() -> list[Event]:
    patch = (
        ToolCallDelta(1, "call_b", "files__patch"),
        ToolCallDelta(1, arguments='{"input": "a'),
        ToolCallDelta(1, arguments='a"}'),
    )
    find = ToolCallDelta(2, "call_c", "mcp__docs__find.all", "{}")
    return [called(ToolCallDelta(0, "call_a", "look", "{}"), *patch, find), ended(FinishReason.TOOL_CALLS)]


def test_calls_have_the_name_and_the_namespace_apart() -> None:
    body = answered(response_answer(tools=TOOLS), *calls())
    validate(body, Response)
    assert [
        {key: item.get(key) for key in ("type", "name", "namespace", "arguments", "input")} for item in body["output"]
    ] == [
        {"type": "function_call", "name": "look", "namespace": None, "arguments": "{}", "input": None},
        {"type": "custom_tool_call", "name": "patch", "namespace": "files", "arguments": None, "input": "aa"},
        {"type": "function_call", "name": "find.all", "namespace": "mcp__docs__", "arguments": "{}", "input": None},
    ]
    again = prompt_of(tools=TOOLS, input=[{"role": "user", "content": "Hi"}, *body["output"]]).messages[-1]
    assert [call["function"]["name"] for call in again["tool_calls"]] == ["look", "files__patch", "mcp__docs__find.all"]


def test_streams_have_the_input_piece_by_piece() -> None:
    events = streamed(response_answer(tools=TOOLS, stream=True), *calls())
    for event in events:
        validate(event, ResponseEvent)
    custom = [event for event in events if event["type"].startswith("response.custom_tool_call_input")]
    assert [event.get("delta") for event in custom] == ["a", "a", None]
    assert custom[-1]["input"] == "aa"
    [added] = [event["item"] for event in events if event["type"].endswith("added") and event["output_index"] == 1]
    assert (added["name"], added["namespace"], added["input"]) == ("patch", "files", "")


def test_responses_repeat_the_tools_that_were_not_left_out() -> None:
    shown = answered(response_answer(tools=TOOLS), ended())["tools"]
    assert [tool["type"] for tool in shown] == ["function", "namespace", "namespace", "custom"]
    assert [tool["type"] for tool in shown[1]["tools"]] == ["function", "custom"]
    assert shown[3] == PATCH
