"""Tests with correct but unusual HTTP: other methods, slashes, versions, and headers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

import pytest

from tests.support.serving.servers import CHAT, HELLO, RunningServer, post, read_all, serving


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as running:
        yield running


def exchange(server: RunningServer, sent: bytes) -> bytes:
    with server.connect() as line:
        line.sendall(sent)
        return read_all(line)


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/health", "/v1/models/fake"])
def test_head_returns_the_headers_of_get(server: RunningServer, path: str) -> None:
    whole, head = server.send("GET", path), server.send("HEAD", path)
    assert (head.status, head.body) == (200, b"")
    assert head.headers["content-length"] == str(len(whole.body))


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "get"])
def test_other_methods_are_not_allowed(server: RunningServer, method: str) -> None:
    reply = server.send(method, CHAT)
    assert (reply.status, reply.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/v1/models", "/v1/\u007f", f"{CHAT}%2f", "/v2/models/x"])
def test_other_paths_are_not_found(server: RunningServer, path: str) -> None:
    reply = server.send("POST", path.replace("\x7f", "%7f%00%0d%0a%ff"), HELLO)
    assert reply.status == 404
    assert "/openapi.json" in reply.error["message"]


@pytest.mark.parametrize("target", ["/v1/models/", "//v1/models", "/v1//models//", "/v1/%6dodels", "/v1/models?a=/b"])
@pytest.mark.parametrize("origin", ["", "http://localhost", "HTTPS://[::1]:8080/"])
def test_paths_are_normalized(server: RunningServer, origin: str, target: str) -> None:
    received = exchange(
        server, f"GET {origin}{target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    )
    assert received.startswith(b"HTTP/1.1 200 ")
    assert json.loads(received.partition(b"\r\n\r\n")[2]) == server.send("GET", "/v1/models").json


@pytest.mark.parametrize("path", [f"{CHAT}/", f"/{CHAT}", f"http://localhost{CHAT}/", f"/{CHAT}/?a=b", f"{CHAT}?a=//"])
def test_normalized_paths_take_bodies(server: RunningServer, path: str) -> None:
    assert exchange(server, post(path, HELLO, Connection="close")).startswith(b"HTTP/1.1 200 ")


def test_a_target_may_be_a_host_alone(server: RunningServer) -> None:
    for target in ("http://localhost", "http://localhost/", "//", "http://localhost?a=b"):
        received = exchange(server, f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert b"<!doctype html>" in received.lower()


@pytest.mark.parametrize("path", ["//v1/messages/", "/v1/responses/", "/infill/", "//api/chat/"])
def test_errors_have_the_form_of_the_normalized_path(server: RunningServer, path: str) -> None:
    odd, usual = (exchange(server, post(each, {}, Connection="close")) for each in (path, "/" + path.strip("/")))
    assert odd.partition(b"\r\n\r\n")[2] == usual.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("name", ["a//b/", "a%2F%2Fb%2F", "%2Fa%2Fb%2F"])
def test_encoded_slashes_belong_to_names(server: RunningServer, name: str) -> None:
    shown = {"a//b/": "a/b", "a%2F%2Fb%2F": "a//b/", "%2Fa%2Fb%2F": "/a/b/"}[name]
    assert repr(shown) in server.send("GET", f"/v1/models/{name}").error["message"]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        (f"/v1{CHAT}", CHAT),
        (f"{CHAT}/chat/completions", CHAT),
        (f"{CHAT}{CHAT}", CHAT),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/api/chat", "/api/chat"),
        ("/messages", "/v1/messages"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/v1/models", "/v1/models"),
    ],
)
def test_wrong_base_urls_get_a_suggestion(server: RunningServer, path: str, meant: str) -> None:
    received = exchange(server, post(path, HELLO, Connection="close"))
    assert f"use {meant}, and check the base URL".encode() in received


def test_queries_do_not_matter(server: RunningServer) -> None:
    assert server.send("POST", f"{CHAT}?api-version=2024-10-21&x=%00", HELLO).status == 200


def test_long_paths_are_not_repeated_in_full(server: RunningServer) -> None:
    for path in ("/" + "a" * 8000, "/v1/models/" + "a" * 8000):
        reply = server.send("GET", path)
        assert reply.status == 404
        assert len(reply.body) < 1000


def test_compressed_bodies_are_refused(server: RunningServer) -> None:
    body = gzip.compress(json.dumps(HELLO).encode())
    reply = server.send("POST", CHAT, body, {"content-encoding": "gzip"})
    assert reply.status == 415
    assert "Content-Encoding" in reply.error["message"]


def test_curl_may_call_json_a_form(server: RunningServer) -> None:
    """It does so without the option -H, as in the examples of Ollama's documentation."""
    headers = {"content-type": "application/x-www-form-urlencoded", "user-agent": "curl/8.5.0"}
    assert server.send("POST", CHAT, HELLO, headers).status == 200
    assert server.send("POST", CHAT, HELLO, {**headers, "user-agent": "Mozilla/5.0 curl/8.5.0"}).status == 415
    assert server.send("POST", CHAT, HELLO, {**headers, "origin": "https://evil.example"}).status == 403


def test_a_missing_content_type_is_json(server: RunningServer) -> None:
    body = json.dumps(HELLO).encode()
    sent = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    )
    assert exchange(server, sent + body).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_is_served_without_chunks(server: RunningServer, stream: bool) -> None:
    body = json.dumps({**HELLO, "stream": stream}).encode()
    received = exchange(server, f"POST {CHAT} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    assert received.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in received.lower()
    assert received.endswith(b"data: [DONE]\n\n" if stream else b"}")


def test_an_offer_of_http_2_is_declined(server: RunningServer) -> None:
    offer = {"Connection": "close, Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2_Settings": "AAMAAABk"}
    assert exchange(server, post(CHAT, HELLO, **offer)).startswith(b"HTTP/1.1 200 ")


def test_streams_can_be_pipelined(server: RunningServer) -> None:
    first, last = post(CHAT, {**HELLO, "stream": True}), post(CHAT, HELLO, Connection="close")
    received = exchange(server, first + first + last)
    assert received.count(b"HTTP/1.1 200 ") == 3
    assert received.count(b"data: [DONE]") == 2
    assert received.rindex(b"data: [DONE]") < received.index(b'"object":"chat.completion"')
