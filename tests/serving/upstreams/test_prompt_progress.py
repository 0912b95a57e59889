"""Tests of what clients receive while an upstream processes the prompt."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest

from tests.support.servers.hostile_server import DONE, HELLO, Asked, Script, event, said
from tests.support.serving.fake_model import TIMEOUT_S
from tests.support.serving.fake_upstream import ANSWER, MODEL, chunked, refusal
from tests.support.serving.fronts import behind, numbered, posts
from tests.support.serving.servers import post, read_until

BODY: dict[str, Any] = {"model": MODEL, "input": "Hello", "stream": True}


def told(processed: int) -> bytes:
    """Return a chunk of a chat with the progress of the prompt."""
    choice = {"index": 0, "delta": {"role": "assistant", "content": None}, "finish_reason": None}
    progress = {"total": 9, "cache": 2, "processed": processed, "time_ms": 7}
    return event({"choices": [choice], "prompt_progress": progress})


def held(*events: bytes) -> tuple[threading.Event, Script]:
    """Return a script that sends events and waits, and the event that then ends the connection in mid-stream."""
    go_on = threading.Event()

    def script(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(chunked(*events))
        assert go_on.wait(TIMEOUT_S)
        connection.shutdown(socket.SHUT_RDWR)

    return go_on, script


def test_progress_is_passed_on_before_the_first_token() -> None:
    go_on, first = held(said("", role="assistant"), told(2), told(5))
    with behind(first, chunked(told(7), HELLO, is_complete=True)) as (front, *servers):
        line = front.begin_chat(model=MODEL, stream=True, return_progress=True)
        read_until(line, b'"processed": 5')
        go_on.set()
        rest = read_until(line, b"[DONE]")
        line.close()
        assert b'"processed": 7' in rest, "another upstream has taken over"
        assert b"Hel" in rest
        assert [len(posts(server)) for server in servers] == [1, 1]


def test_comments_repeat_those_of_the_upstream() -> None:
    go_on, first = held(b": processing prompt 5/9\n\n")
    with behind(first, chunked(HELLO, is_complete=True), ping_s=0.05) as (front, *_):
        line = front.begin_chat(model=MODEL, stream=True)
        read_until(line, b": processing prompt 5/9\n\n")
        go_on.set()
        assert b"Hel" in read_until(line, b"[DONE]")
        line.close()


def test_headers_of_the_upstream_precede_comments() -> None:
    ready = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-LLMRun-Wait: 1.500\r\n"
    go_on = threading.Event()

    def slow(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(ready + b"Transfer-Encoding: chunked\r\n\r\n6\r\n: hi\n\n\r\n")
        assert go_on.wait(TIMEOUT_S)

    with behind(slow, ping_s=0.05) as (front, _):
        line = front.begin_chat(model=MODEL, stream=True)
        assert b"x-llmrun-wait: 1.500" in read_until(line, b": ping\n\n").lower()
        go_on.set()
        line.close()


def test_a_late_refusal_keeps_its_status() -> None:
    """Comments begin later while no upstream has answered."""
    ready = threading.Event()

    def refuse_late(asked: Asked, connection: socket.socket) -> None:
        ready.wait(0.15)
        connection.sendall(refusal("400 Bad", "too hot", type="invalid_request_error"))

    with behind(refuse_late, ping_s=0.1) as (front, _):
        assert front.chat(model=MODEL, stream=True).status == 400


def test_a_whole_answer_may_follow_spaces() -> None:
    """Ollama's clients load a model with a request without messages, which can take minutes."""
    ready, body = threading.Event(), b'{"done":true}'

    def load_slowly(asked: Asked, connection: socket.socket) -> None:
        ready.wait(0.5)
        length = str(len(body)).encode()
        connection.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: " + length + b"\r\n\r\n" + body
        )

    with behind(load_slowly, ping_s=0.01) as (front, _):
        reply = front.send("POST", "/api/chat", {"model": MODEL, "messages": []})
        assert (reply.status, reply.body.strip()) == (200, body)


def response_events(*kinds: str, first: int = 1, numbered: bool = True) -> list[bytes]:
    """Return events of the Responses API, with IDs that begin with `first`."""
    found = []
    for number, kind in enumerate(kinds, first):
        data: dict[str, Any] = {"type": kind, "response": {"id": "resp_1", "status": "in_progress"}}
        data = {"type": kind, "delta": "Hel"} if kind.endswith("delta") else data
        id_line = f"id: {ANSWER}-{number}\n" if numbered else ""
        found.append(f"{id_line}event: {kind}\ndata: {json.dumps(data)}\n\n".encode())
    return found


def test_events_for_timers_are_passed_on_and_resumed() -> None:
    """These events belong to an answer, which another llmrun server can continue."""
    begun = response_events("response.created", "response.in_progress")
    alive = response_events("response.in_progress", numbered=False)
    go_on, first = held(*begun, *alive)
    rest = [*response_events("response.output_text.delta", "response.completed", first=3), DONE]
    with behind(first, chunked(*alive, *rest, is_complete=True)) as (front, _, second):
        line = front.connect()
        line.sendall(post("/v1/responses", BODY))
        received = read_until(line, alive[0] + b"\r\n")
        assert received.count(b"event: response.in_progress") >= 1
        go_on.set()
        received += read_until(line, b"[DONE]")
        line.close()
        (asked,) = posts(second)
        assert asked.headers["last-event-id"] == f"{ANSWER}-2"
    assert received.count(b"event: response.created") == 1
    assert b"Hel" in received


def test_events_that_cannot_be_resumed_are_held_back() -> None:
    """The client must not receive the beginnings of two answers."""
    go_on, first = held(
        *response_events("response.created", "response.in_progress", "response.in_progress", numbered=False)
    )
    rest = response_events("response.created", "response.output_text.delta", "response.completed", numbered=False)
    with behind(first, chunked(*rest, is_complete=True), ping_s=0.05) as (front, *_):
        line = front.connect()
        line.sendall(post("/v1/responses", BODY))
        assert b"data:" not in read_until(line, b": ping\n\n")
        go_on.set()
        assert read_until(line, b"response.completed").count(b"event: response.created") == 1
        line.close()


@pytest.mark.parametrize(
    "second", [[told(5), *numbered(2, "lo")], [*numbered(2, "lo")]], ids=["with progress", "plain"]
)
def test_a_resumed_stream_may_report_progress_again(second: list[bytes]) -> None:
    rest = [*second, said(finish="stop"), DONE]
    with behind(chunked(*numbered(1, "Hel")), chunked(*rest, is_complete=True)) as (front, *_):
        assert front.chat(model=MODEL, stream=True).body == b"".join([*numbered(1, "Hel"), *rest])
