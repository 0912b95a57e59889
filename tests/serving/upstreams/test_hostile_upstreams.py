"""Tests of upstreams that break the rules of HTTP or of an API, and of clients that try to use upstreams for harm."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from tests.support.servers.hostile_server import Asked, event, response, said, serving
from tests.support.serving.fake_upstream import ANSWER, MODEL, chunked, whole
from tests.support.serving.fronts import behind, fronting, numbered, posts
from tests.support.serving.servers import CHAT, RunningServer

KEY = "sk-0123456789abcdef"
ROLE = said("", role="assistant")
CHATTED = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}


def closing(body: bytes, kind: str = "application/json") -> bytes:
    """Return a response whose body ends when the connection closes, so that nothing tells whether it is whole."""
    return f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n".encode() + body


def is_up(front: RunningServer) -> bool:
    return bool(front.service.upstreams and front.service.upstreams.is_up)


@pytest.mark.push
@pytest.mark.parametrize("last_id", ["\xe9", "x", f"{ANSWER}-1\x7f", "a" * 300])
@pytest.mark.parametrize("stream", [True, False])
def test_no_event_id_of_a_client_takes_an_upstream_down(last_id: str, stream: bool) -> None:
    with behind(whole()) as (front, server):
        reply = front.send("POST", CHAT, {**CHATTED, "stream": stream}, {"Last-Event-ID": last_id})
        assert (reply.status, reply.error["code"]) == (400, "invalid_event_id")
        assert is_up(front)
        assert posts(server) == []


@pytest.mark.parametrize("event_id", ["\xe9", "x\0y", "not-an-id"])
def test_strange_event_ids_are_never_sent_to_another_upstream(event_id: str) -> None:
    first = [f"id: {event_id}\n".encode("latin-1") + said("Hel")]
    with behind(chunked(*first), whole()) as (front, _, second):
        received = front.chat(model=MODEL, stream=True).body
        assert received.startswith(first[0])
        assert b'"code":"upstream_lost"' in received
        assert posts(second) == []
        assert front.service.upstreams.all[1].is_up


@pytest.mark.push
@pytest.mark.parametrize(
    "path", ["x%3Fy/cancel", "%2e%2e/cancel", "x%23/cancel", "%00/cancel", "%0a/cancel", "x/cancel"]
)
def test_clients_cannot_choose_paths_of_upstreams(path: str) -> None:
    with behind(whole()) as (front, server):
        assert front.send("POST", f"/v1/responses/{path}", {"model": MODEL}).status == 404
        assert posts(server) == []
        assert is_up(front)


@pytest.mark.push
@pytest.mark.parametrize(
    "answer",
    [
        closing(whole().partition(b"\r\n\r\n")[2].partition(b"}")[0] + b"}"),
        response(b'{"a": 1} }', kind="application/json"),
        response(b"[1]", kind="application/json"),
        response(b'{"error": {"message": "no", "type": "server_error"}}', kind="application/json"),
        response(b'{"error": "no"}', kind="application/json"),
        response(b"", status="204 No Content", kind="application/json"),
        response(b"{}", status="206 Partial Content", kind="application/json"),
        response(b"{}", status="304 Not Modified", kind="application/json"),
    ],
    ids=["cut off", "not JSON", "not an object", "error", "short error", "204", "206", "304"],
)
def test_only_whole_answers_are_passed_on(answer: bytes) -> None:
    with behind(answer, whole()) as (front, broken, _):
        assert b"fine" in front.chat(model=MODEL).body
        assert len(posts(broken)) == 1
    with behind(answer) as (front, _):
        reply = front.chat(model=MODEL)
        assert (reply.status, reply.error["code"]) == (502, "upstream_failed")


def test_a_failed_response_is_an_answer() -> None:
    body = b'{"object": "response", "status": "failed", "error": {"code": "server_error", "message": "no"}}'
    with behind(response(body, kind="application/json")) as (front, _):
        reply = front.send("POST", "/v1/responses", {"model": MODEL, "input": "Hello"})
        assert (reply.status, reply.body) == (200, body)


def test_several_answers_of_infill_are_a_list() -> None:
    body = b'[{"content": "a"}, {"content": "b"}]'
    with behind(response(body, kind="application/json")) as (front, _):
        reply = front.send("POST", "/infill", {"model": MODEL, "input_prefix": "x", "n_cmpl": 2})
        assert (reply.status, reply.body) == (200, body)


def choice(index: int, text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": index, "delta": {"content": text}, "finish_reason": finish}]})


@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt": ["a", "b"]}], ids=str)
def test_a_stream_is_not_whole_before_all_its_choices_are(fields: dict[str, Any]) -> None:
    events = choice(0, "One"), choice(1, "Two"), choice(0, "", "stop")
    with behind(closing(b"".join(events), "text/event-stream")) as (front, _):
        assert b'"code":"upstream_lost"' in front.chat(model=MODEL, stream=True, **fields).body
    with behind(closing(b"".join([*events, choice(1, "", "stop")]), "text/event-stream")) as (front, _):
        assert b"upstream_lost" not in front.chat(model=MODEL, stream=True, **fields).body


@pytest.mark.parametrize("fingerprint", [[], {}, 7, None])
def test_strange_fingerprints_are_no_bug(fingerprint: Any) -> None:
    answers, traits = (
        (chunked(*numbered(1, "Hel")), chunked(*numbered(2, "lo"))),
        ({"system_fingerprint": fingerprint},) * 2,
    )
    with behind(*answers, traits=traits) as (front, *_):
        assert b'"code":"upstream_lost"' in front.chat(model=MODEL, stream=True).body


@pytest.mark.parametrize("created", [None, "yesterday", 1e300, -(10**30), 10**30, True, []])
def test_strange_times_do_not_break_the_lists_of_models(created: Any) -> None:
    with behind(whole(), traits=({"created": created, "max_model_len": "x"},)) as (front, _):
        for path in ("/v1/models", f"/v1/models/{MODEL}", "/api/tags"):
            for headers in ({}, {"anthropic-version": "2023-06-01"}):
                assert MODEL in front.send("GET", path, headers=headers).body.decode()


def test_keys_in_events_with_errors_are_redacted() -> None:
    for kind in ("server_error", "invalid_request_error"):
        failure = event({"error": {"message": f"the key {KEY} may not do this", "type": kind}})
        with behind(chunked(ROLE, failure, is_complete=True), key=KEY) as (front, _):
            received = front.chat(model=MODEL, stream=True).body
            assert b"the key (the key) may not do this" in received


@pytest.mark.parametrize("model", [0, False, [], {}])
def test_models_that_are_no_names_are_not_forwarded(model: Any) -> None:
    with behind(whole()) as (front, server):
        reply = front.chat(model=model)
        assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
        assert posts(server) == []


def test_a_server_without_models_is_not_ready() -> None:
    """Otherwise, two servers that are each other's upstreams would keep each other up."""
    listed = json.dumps({"object": "list", "data": []}).encode()

    def empty(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(response(listed, kind="application/json"))

    with serving(empty) as server, fronting(f"http://127.0.0.1:{server.port}/v1") as front:
        assert not is_up(front)
