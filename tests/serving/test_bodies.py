"""Tests of reading request bodies, with real connections and small limits."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from llmrun.serving.options import Limits, ServingOptions
from tests.support.serving.servers import CHAT, HELLO, RunningServer, eventually, post, read_all, read_until, serving

LIMITS = Limits(body_bytes=200_000, bodies_bytes=300_000, body_s=0.3)
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(options=ServingOptions(limits=LIMITS)) as running:
        yield running
        assert running.chat().status == 200  # after all that the tests did to it


def answer_to(server: RunningServer, *parts: bytes) -> tuple[int, Any]:
    """Send parts of a request and return the status and the JSON of the first response."""
    with server.connect() as line:
        try:
            for part in parts:
                line.sendall(part)
        except ConnectionError:  # the server has answered and closed
            pass
        reply = read_until(line, b"}}")
    return int(reply.split()[1]), json.loads(reply.partition(b"\r\n\r\n")[2])


def test_large_declared_bodies_are_refused_before_they_arrive(server: RunningServer) -> None:
    status, body = answer_to(server, HEAD + b"Content-Length: 100000000\r\n\r\n")
    assert (status, body["error"]["code"]) == (413, "request_too_large")
    assert "200,000 bytes" in body["error"]["message"]


def test_chunked_bodies_are_counted_while_they_arrive(server: RunningServer) -> None:
    chunk = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
    status, body = answer_to(server, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", chunk * 7)
    assert (status, body["error"]["code"]) == (413, "request_too_large")


def test_two_lengths_of_a_body_are_refused(server: RunningServer) -> None:
    """Behind a proxy that believes the other one, the rest of the body could be another user's request."""
    with server.connect() as line:
        line.sendall(HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\n")
        reply = read_all(line)
    assert reply.startswith(b"HTTP/1.1 400")
    assert reply.count(b"HTTP/1.1") == 1


def test_the_rest_of_a_refused_body_is_not_read_for_ever(server: RunningServer) -> None:
    with server.connect() as line:
        line.sendall(HEAD + b"Content-Length: 100000000\r\n\r\n")
        read_until(line, b"request_too_large")
        with pytest.raises(ConnectionError):  # a few kernel buffers more than the limit of 200,000 bytes
            line.sendall(b" " * 100_000_000)


@pytest.mark.push
def test_slow_bodies_end_with_408(server: RunningServer) -> None:
    status, body = answer_to(server, HEAD + b'Content-Length: 20\r\n\r\n{"mes')
    assert status == 408
    assert "0.3 s" in body["error"]["message"]


def test_all_bodies_together_are_limited(server: RunningServer) -> None:
    with server.connect() as first:
        first.sendall(HEAD + b"Content-Length: 190000\r\n\r\n" + b" " * 180_000)
        eventually(lambda: server.service.bodies.held == 180_000)
        status, body = answer_to(server, HEAD + b"Content-Length: 190000\r\n\r\n", b" " * 190_000)
    assert (status, body["error"]["code"]) == (503, "server_overloaded")


def test_stalled_large_bodies_do_not_shut_out_small_ones(server: RunningServer) -> None:
    with server.connect() as first, server.connect() as second:
        for line, count in ((first, 180_000), (second, 115_000)):
            line.sendall(HEAD + b"Content-Length: 190000\r\n\r\n" + b" " * count)
        eventually(lambda: server.service.bodies.held == 295_000)
        assert server.chat(user="x" * 20_000).status == 200
        assert server.chat(user="x" * 100_000).status == 503


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"{", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'{"messages": "\xff"}', "not UTF-8"),
        (b'{"messages": NaN}', "JSON"),
        (b'{"a":' * 500 + b"1" + b"}" * 500, "nested"),
        (b"\x1f\x8b\x08", "UTF-8"),
    ],
)
def test_bodies_that_are_not_json_are_a_400(server: RunningServer, body: bytes, words: str) -> None:
    reply = server.send("POST", CHAT, body)
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert words in reply.error["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-encoding": "gzip"},
    ],
)
def test_only_plain_json_is_accepted(server: RunningServer, headers: dict[str, str]) -> None:
    assert server.send("POST", CHAT, HELLO, headers).status == 415


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"])
def test_json_types_are_accepted(server: RunningServer, kind: str) -> None:
    assert server.send("POST", CHAT, HELLO, {"content-type": kind}).status == 200


def test_large_bodies_are_accepted_in_many_pieces(server: RunningServer) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 190_000}]}).encode()
    with server.connect() as line:
        whole = post(CHAT, body, Connection="close")
        for start in range(0, len(whole), 30_000):
            line.sendall(whole[start : start + 30_000])
        assert b" 200 " in read_all(line).split(b"\r\n")[0]


def test_clients_that_wait_for_100_continue_get_it(server: RunningServer) -> None:
    body = json.dumps(HELLO).encode()
    with server.connect() as line:
        line.sendall(HEAD + f"Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n".encode())
        assert b"100 Continue" in read_until(line, b"\r\n\r\n")
        line.sendall(body)
        assert b" 200 " in read_until(line, b"}}")


def test_clients_that_leave_during_the_body_reach_no_model(server: RunningServer) -> None:
    asked, line = len(server.model.asked), server.connect()
    line.sendall(HEAD + b"Content-Length: 1000\r\n\r\n{")
    line.shutdown(socket.SHUT_RDWR)
    line.close()
    assert server.chat().status == 200
    assert len(server.model.asked) == asked + 1
