"""Tests of Anthropic's API over HTTP, with the real `llmrun serve` and a scripted model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli.tool_chats import RESULT, call, tool_script_file
from tests.support.serving.serve_process import Served, served

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
NOISE: dict[str, Any] = {"temperature": 5, "top_k": 0, "top_p": 1, "min_p": 0, "ignore_eos": True}
TOOL = {
    "name": "get_weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
THINKS = {"thinking": {"type": "adaptive"}}
ANSWERS = (
    ("Weather?", f"<think>\nEasy.\n</think>\n\n{call('get_weather', city='Paris')}"),
    (RESULT, "It is sunny."),
)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A server with a context of 256 tokens, which are bytes."""
    with served("scripted", "--backend", "scripted", "--ctx-size", "256") as running:
        yield running


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tool_script_file(tmp_path_factory.mktemp("tools"), *ANSWERS), "--backend", "scripted") as running:
        yield running


def asking(question: str, **fields: Any) -> dict[str, Any]:
    model = fields.pop("model", "scripted")
    return {"model": model, "max_tokens": 200, "messages": [{"role": "user", "content": question}], **fields}


def raw_events(server: Served, body: dict[str, Any], last: str = "") -> list[bytes]:
    headers = {"last-event-id": last} if last else {}
    status, _, received = server.call("POST", MESSAGES, {**body, "stream": True}, **headers)
    assert status == 200, received
    return received.split(b"\n\n")[:-1]


def data_of(event: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(event.partition(b"data: ")[2])
    return found


@pytest.mark.push
def test_the_text_of_a_stream_is_that_of_the_message(server: Served) -> None:
    fields = asking("Tell me", **NOISE, seed=3)
    deltas = [each["delta"] for each in map(data_of, raw_events(server, fields)) if "delta" in each]
    assert "".join(delta.get("text", "") for delta in deltas) == server.post(MESSAGES, **fields)["content"][0]["text"]


@pytest.mark.push
def test_the_count_is_that_of_the_message(server: Served) -> None:
    fields = asking("Count me", system="Be brief.")
    counted = server.post(COUNT, **fields)["input_tokens"]
    usage = server.post(MESSAGES, **fields)["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted
    again = server.post(MESSAGES, **fields)["usage"]
    assert again["cache_read_input_tokens"] > again["input_tokens"] > 0


@pytest.mark.push
def test_the_first_event_has_the_same_counts_as_the_last(server: Served) -> None:
    fields = asking("Count me twice", system="Be brief.")
    cached = []
    for _ in range(2):
        events = [*map(data_of, raw_events(server, fields))]
        begun, ended = events[0]["message"]["usage"], events[-2]["usage"]
        names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        assert [begun[name] for name in names] == [ended[name] for name in names]
        assert begun["input_tokens"] + begun["cache_read_input_tokens"] == server.post(COUNT, **fields)["input_tokens"]
        cached.append(begun["cache_read_input_tokens"])
    assert cached[1] > cached[0]


@pytest.mark.push
def test_prompts_that_are_too_long_are_counted_but_not_answered(server: Served) -> None:
    assert server.post(COUNT, **asking("x" * 300))["input_tokens"] > 300
    status, _, received = server.call("POST", MESSAGES, asking("x" * 300))
    assert status == 400
    assert re.match(r"prompt is too long: \d+ tokens > 256 maximum", json.loads(received)["error"]["message"])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "end_turn"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"stop_sequences": ["said"]}, "stop_sequence"),
        ({"max_tokens": 1000, **NOISE}, "model_context_window_exceeded"),
    ],
)
def test_the_stop_reason_is_reported(server: Served, fields: dict[str, Any], reason: str) -> None:
    assert server.post(MESSAGES, **asking("Tell me", **fields))["stop_reason"] == reason


def test_the_prompt_ends_with_an_answer_that_is_continued(server: Served) -> None:
    begun = [{"role": "user", "content": "Tell me"}, {"role": "assistant", "content": "You said"}]
    counted = server.post(COUNT, **{**asking(""), "messages": begun})["input_tokens"]
    assert counted == server.post(COUNT, **asking("Tell me"))["input_tokens"] + len("You said")


@pytest.mark.push
def test_a_tool_is_called_and_its_result_used(tools: Served) -> None:
    fields = asking("Weather?", model="script", tools=[TOOL], **THINKS)
    first = tools.post(MESSAGES, **fields)
    thought, called = first["content"]
    assert (thought["thinking"], called["name"], called["input"]) == ("Easy.", "get_weather", {"city": "Paris"})
    assert first["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": called["id"], "content": [{"type": "text", "text": "sunny"}]}
    fields["messages"] += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    second = tools.post(MESSAGES, **fields)
    assert second["content"] == [{"type": "text", "text": "It is sunny."}]
    assert second["usage"]["cache_read_input_tokens"] > 200, "the prompt and the call are cached"


@pytest.mark.night
def test_a_stream_continues_on_another_server(tools: Served, tmp_path: Path) -> None:
    body = asking("Weather?", model="script", tools=[TOOL], **THINKS)
    events = raw_events(tools, body)
    ids = [re.findall(rb"^id: (.+)$", event, re.MULTILINE)[0].decode() for event in events]
    with served(tool_script_file(tmp_path, *ANSWERS), "--backend", "scripted") as another:
        for seen in (1, len(ids) // 2, len(ids) - 2):
            assert without_usage(raw_events(another, body, ids[seen - 1])) == without_usage(events[seen:])


def without_usage(events: list[bytes]) -> list[bytes]:
    """Return events without the numbers of tokens, of which more are cached the second time."""
    return [re.sub(rb'"usage":\{.*\}', b"", event) for event in events]
