"""Tests of tools in all APIs, with the real server and a scripted model that calls tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cli.tool_chats import RESULT, call, tool_script_file
from tests.support.serving.serve_process import Served, served

pytestmark = pytest.mark.push

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
FUNCTION = {"name": "files.read", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
SEARCH = {"type": "web_search"}
USER = {"role": "user", "content": "Go?"}
LIMIT = 50  # tokens; the call has 58


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    answers = ("Go?", call("files.read", path="a.py")), ("Add?", call("add", input="1+1")), (RESULT, "It was cut off.")
    with served(tool_script_file(tmp_path_factory.mktemp("script"), *answers), "--backend", "scripted") as running:
        yield running


def test_a_call_that_was_cut_off_can_be_sent_back_in_chats(server: Served) -> None:
    body: dict[str, Any] = {"messages": [USER], "tools": [TOOL]}
    [choice] = server.post("/v1/chat/completions", max_tokens=LIMIT, **body)["choices"]
    [cut] = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], cut["function"]["name"]) == ("length", "files.read")
    assert not cut["function"]["arguments"].endswith("}")
    result = {"role": "tool", "tool_call_id": cut["id"], "content": "invalid"}
    body["messages"] = [USER, choice["message"], result]
    assert server.post("/v1/chat/completions", **body)["choices"][0]["message"]["content"] == "It was cut off."


def test_a_call_that_was_cut_off_can_be_sent_back_in_responses(server: Served) -> None:
    body: dict[str, Any] = {"input": [USER], "tools": [{"type": "function", **FUNCTION}]}
    cut = server.post("/v1/responses", max_output_tokens=LIMIT, **body)
    assert (cut["status"], cut["output"][0]["status"]) == ("incomplete", "incomplete")
    result = {"type": "function_call_output", "call_id": cut["output"][0]["call_id"], "output": "invalid"}
    body["input"] = [USER, *cut["output"], result]
    assert server.post("/v1/responses", **body)["output"][-1]["content"][0]["text"] == "It was cut off."


@pytest.mark.parametrize("arguments", ['{"path": "a', {}, "[1]"])
def test_any_text_is_accepted_as_arguments_in_ollamas_api(server: Served, arguments: object) -> None:
    said = {"role": "assistant", "tool_calls": [{"function": {"name": "files.read", "arguments": arguments}}]}
    messages = [USER, said, {"role": "tool", "content": "invalid"}]
    body = server.post("/api/chat", messages=messages, tools=[TOOL], stream=False)
    assert body["message"]["content"] == "It was cut off."


def test_custom_tools_are_called_and_answered(server: Served) -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: INT ("+" INT)*\n%import common.INT'}
    body: dict[str, Any] = {
        "input": [{"role": "user", "content": "Add?"}],
        "tools": [{"type": "custom", "name": "add", "format": grammar}],
    }
    [item] = server.post("/v1/responses", **body)["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "add", "1+1")
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "2"}
    body["input"] += [item, result]
    assert server.post("/v1/responses", **body)["output"][-1]["content"][0]["text"] == "It was cut off."


@pytest.mark.parametrize(("syntax", "definition"), [("regex", "(?=a)b"), ("lark", "start: other")])
def test_grammars_that_cannot_be_enforced_are_an_error(server: Served, syntax: str, definition: str) -> None:
    grammar = {"type": "grammar", "syntax": syntax, "definition": definition}
    tools = [{"type": "custom", "name": "add", "format": grammar}]
    status, _, body = server.call("POST", "/v1/responses", {"input": "Add?", "tools": tools})
    assert status == 400
    assert b"add" in body


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"tools": [SEARCH, TOOL]}),
        ("/v1/responses", {"input": "Go?", "tools": [SEARCH, {"type": "function", **FUNCTION}]}),
        ("/api/chat", {"tools": [SEARCH, TOOL], "stream": False}),
        ("/v1/messages", {"max_tokens": 99, "tools": [SEARCH, {"name": "files.read", "input_schema": SCHEMA}]}),
    ],
)
def test_tools_of_other_servers_are_named_in_the_header_and_in_the_log(
    server: Served, path: str, body: dict[str, Any]
) -> None:
    messages = {} if "input" in body else {"messages": [USER]}
    status, headers, _ = server.call("POST", path, {"model": server.model, **messages, **body})
    assert (status, headers["x-llmrun-ignored"]) == (200, "tools.web_search")
    server.wait_for(lambda: path in server.lines[-1])
    assert "  without web_search  " in server.lines[-1]
