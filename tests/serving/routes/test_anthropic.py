"""Tests of Anthropic's routes over HTTP, with a model that plays scripted events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from llmrun.base.errors import BackendCrashed, ContextExceeded, LlmrunError, Overloaded, Unavailable
from llmrun.engine.requests import ChatPrompt
from llmrun.serving.options import Limits, ServingOptions
from tests.support.serving.fake_model import FACTS, HOLD, FakeModel, text
from tests.support.serving.servers import Reply, RunningServer, serving

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
ASKED: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}]}
KEY = "a-long-key-for-tests"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as running:
        yield running


def ask(server: RunningServer, path: str = MESSAGES, /, *, headers: Any = None, **fields: Any) -> Reply:
    return server.send("POST", path, {"max_tokens": 5, **ASKED, **fields}, headers)


def events_of(reply: Reply) -> list[tuple[str, dict[str, Any]]]:
    """Return the type and the data of each event of a stream."""
    found = []
    for event in reply.body.decode().split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in event.split("\n"))
        found.append((lines["event"], json.loads(lines["data"])))
    return found


def test_messages_are_answered(server: RunningServer) -> None:
    reply = ask(server)
    assert reply.json["content"] == [{"type": "text", "text": "Hello there"}]
    assert reply.json["id"] == f"msg_{reply.headers['request-id']}"
    assert reply.json["usage"]["input_tokens"] == 3


def test_the_query_and_headers_of_betas_have_no_effect(server: RunningServer) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "context-management-2025-06-27"}
    assert ask(server, f"{MESSAGES}?beta=true", headers=headers).status == 200


def test_events_have_types(server: RunningServer) -> None:
    reply = ask(server, stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = events_of(reply)
    assert all(kind == data["type"] for kind, data in events)
    assert [kind for kind, _ in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


@pytest.mark.push
def test_silent_streams_get_pings() -> None:
    model = FakeModel(lambda number: [HOLD, *text("one")])
    with serving(model, ServingOptions(limits=replace(Limits(), ping_s=0.02))) as server:
        server.loop.call_soon_threadsafe(server.loop.call_later, 0.3, model.released.set)
        events = events_of(ask(server, stream=True))
    assert events[0] == ("ping", {"type": "ping"})
    assert events[-1] == ("message_stop", {"type": "message_stop"})


def test_an_error_is_the_last_event() -> None:
    with serving(FakeModel(lambda number: [*text("one")[:2], BackendCrashed("x")])) as server:
        kind, data = events_of(ask(server, stream=True))[-1]
    assert (kind, data["error"]["type"]) == ("error", "api_error")
    assert "crashed" in data["error"]["message"]


def test_a_stream_continues_after_every_event() -> None:
    model = FakeModel(lambda number: text("one", "two"))
    model.facts = structs.replace(FACTS, info=replace(FACTS.info, batch_invariant=True))
    with serving(model) as server:
        whole = ask(server, stream=True).body.split(b"\n\n")
        for number, event in enumerate(whole[:-1], 1):
            last = next(line for line in event.split(b"\n") if line.startswith(b"id: "))[4:].decode()
            rest = ask(server, stream=True, headers={"Last-Event-ID": last}).body.split(b"\n\n")
            assert rest == whole[number:]


def test_prompts_are_counted() -> None:
    model = FakeModel()
    with serving(model, ServingOptions(keys=(KEY,))) as server:
        reply = ask(server, COUNT, headers={"x-api-key": KEY}, system="Be brief.", temperature=1)
    assert reply.json == {"input_tokens": 42}
    assert "temperature" in reply.headers["x-llmrun-ignored"]
    (counted,) = model.counted_prompts
    assert isinstance(counted.prompt, ChatPrompt)
    assert [message["role"] for message in counted.prompt.messages] == ["system", "user"]
    assert counted.tenant, "the owner of the key takes its turn"
    assert model.asked == []


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
@pytest.mark.parametrize(
    ("method", "body", "headers", "status", "kind"),
    [
        ("POST", {"max_tokens": 5, **ASKED, "messages": []}, {}, 400, "invalid_request_error"),
        ("POST", {"max_tokens": 5, **ASKED, "model": "claude-opus-4-8"}, {}, 404, "not_found_error"),
        ("POST", b"{", {}, 400, "invalid_request_error"),
        ("POST", b" " * 2000, {}, 413, "request_too_large"),
        ("POST", b"a=b", {"content-type": "text/plain"}, 415, "invalid_request_error"),
        ("GET", None, {}, 405, "invalid_request_error"),
        ("POST", {}, {"x-api-key": "wrong"}, 401, "authentication_error"),
        ("POST", {}, {"origin": "https://evil.example"}, 403, "permission_error"),
    ],
)
def test_errors_have_the_form_of_the_api(
    path: str, method: str, body: Any, headers: dict[str, str], status: int, kind: str
) -> None:
    options = ServingOptions(keys=(KEY,), limits=replace(Limits(), body_bytes=1000))
    with serving(options=options) as server:
        reply = server.send(method, path, body, {"x-api-key": KEY, **headers})
    assert (reply.status, reply.json["type"], reply.error["type"]) == (status, "error", kind)
    assert reply.error["message"]


def test_unknown_paths_have_the_form_of_the_api(server: RunningServer) -> None:
    reply = server.send("POST", f"{MESSAGES}/batches", {})
    assert (reply.status, reply.json["type"], reply.error["type"]) == (404, "error", "not_found_error")


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ContextExceeded.by_prompt(5000, 4096, hint="shorten the prompt"), 400, "invalid_request_error"),
        (Overloaded("the queue is full", retry_after=3), 429, "rate_limit_error"),
        (Unavailable("restarting", state="restarting"), 503, "overloaded_error"),
        (LlmrunError("anything"), 500, "api_error"),
    ],
)
def test_errors_of_the_engine_have_a_type(error: LlmrunError, status: int, kind: str) -> None:
    model = FakeModel()
    model.refusal = error
    with serving(model) as server:
        reply = ask(server, stream=True)
    assert (reply.status, reply.error["type"]) == (status, kind)


def test_models_are_listed_in_the_form_that_the_client_expects(server: RunningServer) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    page = server.send("GET", "/v1/models?limit=1000", headers=headers).json
    assert (page["data"][0]["id"], page["data"][0]["type"], page["has_more"]) == ("fake", "model", False)
    assert server.send("GET", "/v1/models/fake", headers=headers).json == page["data"][0]
    assert server.send("GET", "/v1/models").json["object"] == "list"


def test_models_without_a_template_refuse_messages() -> None:
    model = FakeModel()
    model.facts = structs.replace(FACTS, takes_chats=False)
    with serving(model) as server:
        assert "no chat template" in ask(server).error["message"]
