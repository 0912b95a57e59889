"""Tests of what Open Responses' compliance tests check over HTTP, with a model that calls a tool.

Tests that need images, files, hosted tools or stored responses are left out.
Source: https://www.openresponses.org/compliance and /specification
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cli.tool_chats import RESULT, call, tool_script_file
from tests.support.serving.serve_process import Served, served

# The fields of a response that must be there, with their JSON types; "?" means that it may be null.
RESPONSE = {
    "id": "str",
    "object": "str",
    "created_at": "int",
    "completed_at": "int?",
    "status": "str",
    "incomplete_details": "dict?",
    "model": "str",
    "previous_response_id": "str?",
    "instructions": "str?",
    "output": "list",
    "error": "dict?",
    "tools": "list",
    "tool_choice": "str",
    "truncation": "str",
    "parallel_tool_calls": "bool",
    "text": "dict",
    "top_p": "float",
    "presence_penalty": "float",
    "frequency_penalty": "float",
    "top_logprobs": "int",
    "temperature": "float",
    "reasoning": "dict?",
    "usage": "dict?",
    "max_output_tokens": "int?",
    "max_tool_calls": "int?",
    "store": "bool",
    "background": "bool",
    "service_tier": "str",
    "metadata": "dict",
    "safety_identifier": "str?",
    "prompt_cache_key": "str?",
}
ITEMS = {
    "message": {"id": "str", "status": "str", "role": "str", "content": "list"},
    "function_call": {"id": "str", "call_id": "str", "name": "str", "arguments": "str", "status": "str"},
}
PART = {"type": "str", "text": "str", "annotations": "list"}
TOOL = {"type": "str", "name": "str", "description": "str?", "parameters": "dict?", "strict": "bool?"}
USAGE = {
    "input_tokens": "int",
    "output_tokens": "int",
    "total_tokens": "int",
    "input_tokens_details": "dict",
    "output_tokens_details": "dict",
}
_OF_ITEM = {"output_index": "int", "item": "dict"}
_OF_CONTENT = {"item_id": "str", "output_index": "int", "content_index": "int"}
EVENTS = {
    "response.created": {"response": "dict"},
    "response.in_progress": {"response": "dict"},
    "response.completed": {"response": "dict"},
    "response.output_item.added": _OF_ITEM,
    "response.output_item.done": _OF_ITEM,
    "response.content_part.added": {**_OF_CONTENT, "part": "dict"},
    "response.content_part.done": {**_OF_CONTENT, "part": "dict"},
    "response.output_text.delta": {**_OF_CONTENT, "delta": "str", "logprobs": "list"},
    "response.output_text.done": {**_OF_CONTENT, "text": "str", "logprobs": "list"},
    "response.function_call_arguments.delta": {"item_id": "str", "output_index": "int", "delta": "str"},
    "response.function_call_arguments.done": {"item_id": "str", "output_index": "int", "arguments": "str"},
}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Tell the weather in a city",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}
CITY = "What is the weather in Oslo?"
CONVERSATIONS: dict[str, Any] = {
    "a message": [{"type": "message", "role": "user", "content": "Hello?"}],
    "a text": "Hello?",
    "a system message": [
        {"type": "message", "role": "system", "content": "Talk like a pirate."},
        {"type": "message", "role": "user", "content": "Hello?"},
    ],
    "several turns": [
        {"type": "message", "role": "user", "content": "My name is Alice."},
        {"type": "message", "role": "assistant", "content": "Hello Alice!"},
        {"type": "message", "role": "user", "content": "Hello?"},
    ],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    script = tool_script_file(
        tmp_path_factory.mktemp("tools"),
        (CITY, call("get_weather", location="Oslo")),
        ("Hello?", "Hello there, you!"),
        (RESULT, "It is sunny."),
    )
    with served(script, "--backend", "scripted") as running:
        yield running


def check(value: dict[str, Any], fields: dict[str, str]) -> None:
    """Check that an object has these fields, with values of these types."""
    for name, kind in fields.items():
        assert name in value
        found = type(value[name]).__name__
        assert found == kind.rstrip("?") or (kind.endswith("?") and value[name] is None), (name, found)


def checked(body: dict[str, Any]) -> dict[str, Any]:
    """Return a completed response after checking its form at all depths."""
    check(body, RESPONSE)
    assert body["status"] == "completed"
    assert body["output"]
    for item in body["output"]:
        check_item(item)
        assert item["status"] == "completed"
    for tool in body["tools"]:
        check(tool, TOOL)
    check(body["usage"], USAGE)
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + body["usage"]["output_tokens"]
    assert {"effort", "summary"} <= body["reasoning"].keys()
    return body


def check_item(item: dict[str, Any]) -> None:
    check(item, ITEMS[item["type"]])
    for part in item.get("content", ()):
        check(part, PART)


def stream(server: Served, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, of which each has the right form and a number."""
    events = server.stream("/v1/responses", **body)
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        check(event, EVENTS[event["type"]])
        if "item" in event:
            check_item(event["item"])
    return events


@pytest.mark.push
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversations_are_answered(server: Served, name: str) -> None:
    body = checked(server.post("/v1/responses", model=server.model, input=CONVERSATIONS[name], temperature=0))
    assert [item["type"] for item in body["output"]] == ["message"]
    assert body["output"][0]["content"][0]["text"] == "Hello there, you!"


@pytest.mark.push
def test_streams_have_valid_events_and_a_final_response(server: Served) -> None:
    events = stream(server, model=server.model, input="Hello?", temperature=0)
    assert checked(events[-1]["response"])["output"][0]["content"][0]["text"] == "Hello there, you!"


@pytest.mark.push
@pytest.mark.parametrize("choice", ["auto", {"type": "function", "name": "get_weather"}])
def test_tools_are_called(server: Served, choice: Any) -> None:
    fields = {"tools": [WEATHER], "tool_choice": choice, "temperature": 0}
    body = server.post("/v1/responses", input=CITY, **fields)
    assert body["tool_choice"] == choice
    checked({**body, "tool_choice": "auto"})
    assert [(item["type"], item["name"]) for item in body["output"]] == [("function_call", "get_weather")]
    assert json.loads(body["output"][0]["arguments"]) == {"location": "Oslo"}


def test_streams_of_calls_have_their_events(server: Served) -> None:
    events = stream(server, input=CITY, tools=[WEATHER], temperature=0)
    kinds = [event["type"] for event in events]
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= {*kinds}
    for kind in ("response.output_item.added", "response.output_item.done"):
        assert [event["item"]["type"] for event in events if event["type"] == kind] == ["function_call"]


def test_results_of_calls_are_read(server: Served) -> None:
    question = {"role": "user", "content": CITY}
    fields = {"tools": [WEATHER], "temperature": 0}
    first = server.post("/v1/responses", input=[question], **fields)
    result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "64 degrees"}
    body = checked(server.post("/v1/responses", input=[question, *first["output"], result], **fields))
    assert body["output"][0]["content"][0]["text"] == "It is sunny."
    assert body["usage"]["input_tokens"] > first["usage"]["input_tokens"]


@pytest.mark.push
def test_calls_that_need_a_store_are_refused(server: Served) -> None:
    status, _, received = server.call("POST", "/v1/responses", {"input": "Hello?", "previous_response_id": "resp_1"})
    assert (status, b"stores no responses" in received) == (400, True)
