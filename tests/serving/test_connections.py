"""Tests with hostile connections: slow, silent, greedy, broken, and too many. Real sockets, small limits."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from llmrun.engine.requests import TextDelta
from llmrun.serving.options import Limits, ServingOptions
from tests.support.serving.fake_model import FakeModel, text
from tests.support.serving.servers import CHAT, HELLO, RunningServer, post, read_all, read_until, serving

LIMITS = Limits(header_s=0.3, unread_s=0.3, linger_s=0.3, header_bytes=4096)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(options=ServingOptions(limits=LIMITS)) as running:
        yield running
        assert running.chat().status == 200  # after all that the tests did to it


@pytest.mark.push
@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: y"])
def test_slow_headers_end_with_408(server: RunningServer, sent: bytes) -> None:
    with server.connect() as line:
        line.sendall(sent)
        assert read_all(line).startswith(b"HTTP/1.1 408 ")


@pytest.mark.push
def test_headers_cannot_be_dripped(server: RunningServer) -> None:
    with server.connect() as line:
        line.settimeout(0.02)
        received = b""
        with contextlib.suppress(ConnectionError):
            while b"408" not in received:
                line.sendall(b"G")
                with contextlib.suppress(TimeoutError):
                    received += line.recv(4096)
        assert b" 408 " in received


@pytest.mark.push
def test_the_second_header_of_a_connection_is_limited_too(server: RunningServer) -> None:
    with server.connect() as line:
        line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        read_until(line, b'{"status":"ok"}')
        line.sendall(b"GET /health")
        assert b"HTTP/1.1 408 " in read_all(line)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 100_000,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 10_000 + b"\r\n\r\n",  # complete, in one piece
        b"GET /" + b"y" * 10_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["unfinished", "header", "path"],
)
def test_huge_headers_end_with_431(server: RunningServer, sent: bytes) -> None:
    with server.connect() as line:
        line.sendall(sent)
        assert read_all(line).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\xff\xfe garbage\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",  # no Host
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    ],
)
def test_what_is_not_http_ends_with_400(server: RunningServer, sent: bytes) -> None:
    with server.connect() as line:
        line.sendall(sent)
        reply = read_all(line)
    assert reply.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 408 "))
    assert b'{"error":{' in reply


def test_garbage_instead_of_a_chunk_ends_the_request(server: RunningServer) -> None:
    asked = len(server.model.asked)
    with server.connect() as line:
        line.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n"
        )
        assert b"HTTP/1.1 400 " in read_all(line)
    assert len(server.model.asked) == asked


def test_websockets_are_not_offered(server: RunningServer) -> None:
    with server.connect() as line:
        line.sendall(
            b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        assert b" 200 " in read_until(line, b"}]}")


@pytest.mark.push
def test_idle_connections_do_not_keep_others_out(server: RunningServer) -> None:
    with contextlib.ExitStack() as held:
        lines = [held.enter_context(server.connect()) for _ in range(200)]
        assert server.chat().status == 200
        assert all(read_all(line).startswith(b"HTTP/1.1 408 ") for line in lines)


def test_more_connections_than_the_limit_get_an_answer() -> None:
    limits = Limits(connections=3)
    with serving(options=ServingOptions(limits=limits)) as server, contextlib.ExitStack() as held:
        for _ in range(3):
            held.enter_context(server.begin_chat()).recv(10)
        reply = server.chat()
        assert (reply.status, reply.error["code"]) == (503, "too_many_connections")
        assert reply.headers["retry-after"] == "1"


@pytest.mark.push
def test_a_client_that_reads_nothing_is_cut_off_and_cancelled() -> None:
    """The answer is larger than the buffers of both sockets, and never ends by itself."""
    huge = [TextDelta(0, "x" * 100_000, (1,))] * 400
    model = FakeModel(lambda number: [*huge, "hold"] if number == 0 else text("fine"))
    with serving(model, ServingOptions(limits=LIMITS)) as server:
        line = socket.socket()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(("127.0.0.1", server.port))
        line.sendall(post(CHAT, {**HELLO, "stream": True}))
        model.wait_for("cancelled")
        assert server.chat().status == 200
        line.close()


def test_a_client_that_reads_slowly_gets_everything() -> None:
    words = ["y" * 20_000] * 50
    limits = replace(LIMITS, unread_s=20.0)
    with serving(FakeModel(lambda number: text(*words)), ServingOptions(limits=limits)) as server:
        line = socket.socket()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(("127.0.0.1", server.port))
        line.sendall(post(CHAT, {**HELLO, "stream": True}, Connection="close"))
        received = bytearray()
        while part := line.recv(4000):
            received += part
        line.close()
    assert received.count(b"y" * 20_000) == 50
    assert b"data: [DONE]" in received


def test_requests_on_one_connection_are_answered_in_order(server: RunningServer) -> None:
    with server.connect() as line:
        line.sendall(post("/tokenize", {"content": "a"}) + post("/tokenize", {"content": "b"}, Connection="close"))
        received = read_all(line)
    assert received.index(b"[97]") < received.index(b"[98]")
