"""Tests of tool calls in plain JSON, in all APIs, with the real `llmrun serve` and a scripted model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cli.tool_chats import RESULT, text_call, tool_script_file
from tests.support.serving.serve_process import Served, served

CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
PATHS = (CHAT, RESPONSES, MESSAGES, OLLAMA)
PARIS = text_call("get_weather", city="Paris")
FENCED = f"```json\n{PARIS}\n```"
SHOWN = f"```json\n{text_call('get_weather', town='Paris')}\n```"  # not what the tool takes
ANSWERS = (("Bare?", PARIS), ("Fenced?", FENCED), ("Show?", SHOWN), ("Said?", f"So: {PARIS}"), (RESULT, "It is sunny."))
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
Answer = tuple[str, list[Any], str]  # the text, the arguments of the calls, and the reason for the end
FUNCTION = {"name": "get_weather", "parameters": SCHEMA}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tool_script_file(tmp_path_factory.mktemp("texts"), *ANSWERS), "--backend", "scripted") as running:
        yield running


def body_of(path: str, question: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    if path == RESPONSES:
        return {"input": messages, "tools": [{"type": "function", **FUNCTION}]}
    if path == MESSAGES:
        tools = [{"name": "get_weather", "input_schema": SCHEMA}]
        thinking = {"type": "adaptive"}  # without thinking, prompts do not end as the script expects
        return {"model": "script", "max_tokens": 300, "messages": messages, "tools": tools, "thinking": thinking}
    return {"messages": messages, "tools": [{"type": "function", "function": FUNCTION}]}


def events_of(server: Served, path: str, question: str) -> list[dict[str, Any]]:
    """Return the JSON objects of a stream."""
    status, _, received = server.call("POST", path, {**body_of(path, question), "stream": True})
    assert status == 200, received
    lines = received.decode().splitlines()
    if path != OLLAMA:
        lines = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    return [*map(json.loads, lines)]


def whole(server: Served, path: str, question: str) -> Answer:
    """Ask without a stream."""
    body = server.post(path, **body_of(path, question), stream=False)
    if path == CHAT:
        choice = body["choices"][0]
        calls = choice["message"].get("tool_calls", [])
        arguments = [json.loads(call["function"]["arguments"]) for call in calls]
        return choice["message"]["content"] or "", arguments, choice["finish_reason"]
    if path == RESPONSES:
        text = "".join(part["text"] for item in body["output"] for part in item.get("content", ()))
        calls = [item for item in body["output"] if item["type"] == "function_call"]
        return text, [json.loads(call["arguments"]) for call in calls], body["status"]
    if path == MESSAGES:
        text = "".join(block.get("text", "") for block in body["content"])
        return text, [block["input"] for block in body["content"] if block["type"] == "tool_use"], body["stop_reason"]
    calls = body["message"].get("tool_calls", [])
    return body["message"]["content"], [call["function"]["arguments"] for call in calls], body["done_reason"]


def streamed(server: Served, path: str, question: str) -> Answer:
    """Ask with a stream."""
    events = events_of(server, path, question)
    if path == CHAT:
        choices = [event["choices"][0] for event in events if event["choices"]]
        pieces = [piece for choice in choices for piece in choice["delta"].get("tool_calls", ())]
        arguments = "".join(piece["function"]["arguments"] for piece in pieces)
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        return text, [json.loads(arguments)] if pieces else [], choices[-1]["finish_reason"]
    if path == RESPONSES:
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
        return text, [json.loads(event["arguments"]) for event in done], events[-1]["response"]["status"]
    if path == MESSAGES:
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        arguments = "".join(delta.get("partial_json", "") for delta in deltas)
        text = "".join(delta.get("text", "") for delta in deltas)
        [ending] = [event["delta"] for event in events if event["type"] == "message_delta"]
        return text, [json.loads(arguments)] if arguments else [], ending["stop_reason"]
    calls = [call for event in events for call in event["message"].get("tool_calls", ())]
    text = "".join(event["message"]["content"] for event in events)
    return text, [call["function"]["arguments"] for call in calls], events[-1]["done_reason"]


CALLED = {CHAT: "tool_calls", RESPONSES: "completed", MESSAGES: "tool_use", OLLAMA: "stop"}
SAID = {CHAT: "stop", RESPONSES: "completed", MESSAGES: "end_turn", OLLAMA: "stop"}


@pytest.mark.push
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("question", ["Bare?", "Fenced?"])
def test_a_call_as_text_is_a_call(server: Served, path: str, question: str) -> None:
    expected = ("", [{"city": "Paris"}], CALLED[path])
    assert whole(server, path, question) == streamed(server, path, question) == expected


@pytest.mark.push
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("question", "text"), [("Show?", SHOWN), ("Said?", f"So: {PARIS}")])
def test_other_answers_stay_text(server: Served, path: str, question: str, text: str) -> None:
    expected: Answer = (text, [], SAID[path])
    assert whole(server, path, question) == streamed(server, path, question) == expected


def test_text_that_is_no_call_is_streamed(server: Served) -> None:
    deltas = [event["choices"][0]["delta"] for event in events_of(server, CHAT, "Said?") if event["choices"]]
    assert sum(bool(delta.get("content")) for delta in deltas) > 40


def test_the_call_in_the_history_has_the_tags_of_the_template(server: Served) -> None:
    """The model wrote the call as plain JSON, but in the next prompt, the call is in the template's form."""
    first = server.post(CHAT, **body_of(CHAT, "Fenced?"))
    message = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
    body = body_of(CHAT, "Fenced?")
    second = server.post(CHAT, **{**body, "messages": [*body["messages"], message, result]})
    assert second["choices"][0]["message"]["content"] == "It is sunny."
    tagged = {**message, "tool_calls": [{**message["tool_calls"][0], "id": "call_1"}]}
    same = {**body, "messages": [*body["messages"], tagged, {**result, "tool_call_id": "call_1"}]}
    assert server.post(CHAT, **same)["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]


def test_the_choice_decides(server: Served) -> None:
    body = server.post(CHAT, **body_of(CHAT, "Bare?"), tool_choice="none")
    assert body["choices"][0]["message"]["content"] == PARIS


@pytest.mark.push
def test_a_setting_switches_it_off(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, server: Served) -> None:
    monkeypatch.setenv("LLMRUN_TOOL_TEXT", "off")
    with served(tool_script_file(tmp_path, *ANSWERS), "--backend", "scripted") as off:
        assert whole(off, CHAT, "Fenced?") == streamed(off, CHAT, "Fenced?") == (FENCED, [], "stop")
        prints = {one.chat("Show?")["system_fingerprint"] for one in (server, off)}
    assert len(prints) == 2
