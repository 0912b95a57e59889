"""Tests of the client of the serving benchmark: complete, broken and hostile responses."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

from llmrun.base.errors import NetworkError
from llmrun.engine.remote.request import parse_endpoint
from llmrun.engine.remote.stream import Teller
from llmrun.jobs.bench.serving.driving import Exchange, Sender
from llmrun.jobs.bench.serving.record import Record, parsed
from tests.support.servers.hostile_server import (
    DONE,
    HELLO,
    Asked,
    HangUp,
    HostileServer,
    Script,
    counted,
    event,
    response,
    said,
    serving,
    stream_head,
)

KEY = "sk-very-secret"
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


async def sent_to(server: HostileServer, silence_s: float) -> Exchange:
    sender = Sender(parse_endpoint(server.url), KEY, silence_s=silence_s)
    await sender.connect()
    return await sender.post("/completions", b'{"stream": true}', time.perf_counter())


def exchanged(script: Script | bytes, *, silence_s: float = 30.0) -> Exchange:
    with serving(script) as server:
        return asyncio.run(sent_to(server, silence_s))


def recorded(script: Script | bytes) -> Record:
    found = exchanged(script)
    return parsed(found, found.sent, Teller("host", KEY))


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(stream_head() + HELLO, id="until the connection closes"),
        pytest.param(response(HELLO), id="with a length"),
        pytest.param(CHUNKED + chunk(HELLO[:50]) + chunk(HELLO[50:]) + b"0\r\n\r\n", id="chunked"),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n" + response(HELLO), id="after an informational response"),
    ],
)
def test_an_answer_is_complete(stream: bytes) -> None:
    found = recorded(stream)
    assert (found.problem, len(found.moments), found.output_tokens) == ("", 2, 3)
    assert 0 < found.moments[0] <= found.moments[1] <= found.ended


def test_the_request_is_complete_and_has_the_key() -> None:
    with serving(response(HELLO)) as server:
        asyncio.run(sent_to(server, 30.0))
    asked = server.asked[-1]
    assert (asked.method, asked.path, asked.body) == ("POST", "/v1/completions", {"stream": True})
    assert asked.headers["authorization"] == f"Bearer {KEY}"
    assert asked.headers["connection"] == "close"
    assert asked.headers["host"] == f"127.0.0.1:{server.port}"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"", "connection lost"),
        (b"HTTP/1.1 200 OK\r\nContent-", "connection lost"),
        (CHUNKED + chunk(HELLO[:50]), "connection lost"),
        (CHUNKED + chunk(HELLO[:50]) + b"zz\r\n", "invalid HTTP"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "invalid HTTP"),
        (response(said("Hel")), "answer was cut off"),
        (stream_head() + said("Hel"), "answer was cut off"),
        (response(b"data: {\n\n"), "answer is not valid JSON"),
        (response(said("Hel") + event({"error": {"message": "boom"}})), "the server reported an error"),
        (response(b"{}", kind="application/json"), "answer is not an event stream"),
        (response(b'{"error": {"message": "boom"}}', status="500 Oops", kind="application/json"), "HTTP 500"),
        (response(b"<html>", status="502 Bad Gateway", kind="text/html"), "HTTP 502"),
        (response(b"", status="307 Moved", kind="text/html"), "HTTP 307"),
    ],
)
def test_a_failure_has_a_kind(answer: bytes, problem: str) -> None:
    found = recorded(answer)
    assert (found.problem, found.moments) == (problem, ())


def test_the_message_of_a_failure_hides_the_key() -> None:
    found = recorded(response(f'{{"error": "no {KEY} \\u001b[31m"}}'.encode(), status="500 Oops", kind="text/plain"))
    assert KEY not in found.words
    assert found.words.isprintable()


def test_an_answer_without_text_has_one_moment() -> None:
    found = recorded(response(said(finish="stop") + counted(5, 1) + DONE))
    assert (found.problem, len(found.moments), found.output_tokens) == ("", 1, 1)


def test_a_silent_server_times_out() -> None:
    over = threading.Event()

    def script(asked: Asked, connection: socket.socket) -> None:
        over.wait(30)

    found = exchanged(script, silence_s=0.05)
    over.set()
    assert (found.status, found.problem) == (0, "timed out")


@pytest.mark.push
def test_a_slow_stream_does_not_time_out() -> None:
    """The limit is for silence, not for the whole answer."""

    def script(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(stream_head())
        for _ in range(14):
            time.sleep(0.03)
            connection.sendall(said("a"))
        connection.sendall(said(finish="stop") + DONE)
        raise HangUp

    found = exchanged(script, silence_s=0.3)
    assert (found.problem, found.status) == ("", 200)


def test_an_unreachable_server_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(NetworkError, match=f"unreachable: 127.0.0.1:{port}"):
        asyncio.run(Sender(parse_endpoint(f"http://127.0.0.1:{port}#m")).connect())


def test_a_server_that_goes_away_fails_only_the_request() -> None:
    async def run() -> Exchange:
        with serving(response(HELLO)) as server:
            sender = Sender(parse_endpoint(server.url))
            await sender.connect()
        return await sender.post("/completions", b"{}", 0.0)

    assert asyncio.run(run()).problem in ("unreachable", "connection lost")


def test_an_endless_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmrun.jobs.bench.serving.driving._MOST_BYTES", 1000)

    def script(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(stream_head())
        while True:
            connection.sendall(said("a"))

    assert exchanged(script).problem == "answer too long"
