"""Tests of how the pool finds out whether upstreams are up."""

from __future__ import annotations

import re
import socket
import threading
from contextlib import ExitStack
from dataclasses import replace

import pytest

from tests.support.servers.hostile_server import (
    Asked,
    HangUp,
    HostileServer,
    Script,
    response,
    serving,
    wait_for_hang_up,
)
from tests.support.servers.rpc_server import closed_port
from tests.support.serving.fake_upstream import MODEL, refusal, upstream, whole
from tests.support.serving.fronts import QUICK, fronting
from tests.support.serving.servers import RunningServer, eventually

KEY = "sk-0123456789abcdef"


def up(front: RunningServer) -> list[int]:
    text = front.send("GET", "/metrics").body.decode()
    return [int(value) for value in re.findall(r"^llmrun_upstream_up\{.*\} (\d)$", text, re.MULTILINE)]


class Failing:
    """The script of a server that can be made to answer every request with something else."""

    def __init__(self) -> None:
        self.instead: bytes | None = None
        self._healthy = upstream(whole())

    def __call__(self, asked: Asked, connection: socket.socket) -> None:
        if self.instead is None:
            self._healthy(asked, connection)
        else:
            connection.sendall(self.instead.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            raise HangUp


@pytest.mark.push
@pytest.mark.parametrize(
    ("instead", "words"),
    [
        (b"", "Server disconnected"),
        (b"nonsense\r\n\r\n", "illegal status line"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000, "connection lost"),
        (response(b'{"status": "draining"}', status="503 No", kind="application/json"), "not ready: .*draining"),
        (refusal("401 No", f"wrong key {KEY}"), r"not authorized \(HTTP 401\); see --upstream-key-file"),
        (refusal("500 No"), "HTTP 500 for /v1/models"),
        (response(b"<html>"), "no list of models"),
        (response(b'{"data": 5}'), "no list of models"),
        (response(b"[" * 10_000), "no list of models"),
        (response(b"", status="301 Moved", Location="http://other/"), r"redirected \(HTTP 301\)"),
        (response(b"x", Content_Encoding="gzip"), "compressed"),
        (response(b" " * (5 << 20)), "more than"),
    ],
)
def test_failing_upstreams_are_down_until_they_recover(instead: bytes, words: str) -> None:
    failing, notes = Failing(), list[str]()
    with serving(failing) as server, fronting(f"http://127.0.0.1:{server.port}", notes=notes, key=KEY) as front:
        assert up(front) == [1]
        failing.instead = instead
        eventually(lambda: up(front) == [0])
        assert front.chat(model=MODEL).status == 503
        failing.instead = None
        eventually(lambda: up(front) == [1])
        assert front.chat(model=MODEL).status == 200
    assert [note.split(": ")[1] for note in notes] == ["up", "down", "up"]
    assert re.search(words, notes[1])
    assert KEY not in str(notes)


def test_silent_upstreams_are_down() -> None:
    def silent(asked: Asked, connection: socket.socket) -> None:
        wait_for_hang_up(server, connection)

    notes: list[str] = []
    pace = replace(QUICK, answer_s=0.1)
    with serving(silent) as server, fronting(f"http://127.0.0.1:{server.port}", notes=notes, pace=pace) as front:
        assert up(front) == [0]
        assert "no answer within 0.1 s" in notes[0] or "no answer for too long" in notes[0]


@pytest.mark.push
def test_requests_to_an_upstream_that_falls_silent_move() -> None:
    stuck, arrived = threading.Event(), threading.Event()
    healthy = upstream(whole())

    def falls_silent(asked: Asked, connection: socket.socket) -> None:
        if asked.method == "POST":
            stuck.set()
            arrived.set()
        if stuck.is_set():
            wait_for_hang_up(first, connection)
            raise HangUp
        healthy(asked, connection)

    pace = replace(QUICK, answer_s=0.2, silent_s=0.3)
    with ExitStack() as stack:
        first = stack.enter_context(serving(falls_silent))
        second = stack.enter_context(serving(healthy))
        urls = [f"http://127.0.0.1:{server.port}" for server in (first, second)]
        front = stack.enter_context(fronting(*urls, pace=pace))
        assert front.chat(model=MODEL).status == 200
        assert arrived.is_set()
        assert up(front) == [0, 1]


def test_metrics_count_requests_without_showing_keys() -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(upstream(answer))) for answer in (refusal("500 No"), whole())]
        urls = [f"http://127.0.0.1:{server.port}/v1" for server in servers]
        front = stack.enter_context(fronting(*urls, key=KEY))
        assert front.chat(model=MODEL).status == 200
        text = front.send("GET", "/metrics").body.decode()
    for name, values in {"up": "11", "requests_in_flight": "00", "requests_total": "11", "moved_total": "10"}.items():
        for url, value in zip(urls, values, strict=True):
            assert f'llmrun_upstream_{name}{{upstream="{url}"}} {value}\n' in text
    assert KEY not in text


def test_health_needs_an_own_model_or_an_upstream() -> None:
    with fronting(f"http://127.0.0.1:{closed_port()}") as front:
        assert front.send("GET", "/health").status == 200
        front.call(lambda: setattr(front.model, "state", "restarting"))
        assert front.send("GET", "/health").status == 503
    with serving(upstream(whole())) as server, fronting(f"http://127.0.0.1:{server.port}") as front:
        front.call(lambda: setattr(front.model, "state", "restarting"))
        assert front.send("GET", "/health").status == 200


def with_load(running: int) -> Script:
    """Return the script of an upstream whose metrics report requests in progress."""
    plain = upstream(whole())

    def script(asked: Asked, connection: socket.socket) -> None:
        if asked.path == "/metrics":
            connection.sendall(response(f'vllm:num_requests_running{{engine="0"}} {running}.0\n'.encode()))
        else:
            plain(asked, connection)

    return script


def test_requests_of_others_count_as_load() -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(with_load(running))) for running in (5, 0)]
        front = stack.enter_context(fronting(*(f"http://127.0.0.1:{server.port}" for server in servers)))
        eventually(lambda: any(asked.path == "/metrics" for asked in servers[0].asked))
        for _ in range(3):
            assert front.chat(model=MODEL).status == 200
    assert [sum(asked.method == "POST" for asked in server.asked) for server in servers] == [0, 3]


def paths(server: HostileServer) -> list[str]:
    return [asked.path for asked in server.asked]


def test_other_apis_are_found_beside_v1() -> None:
    with serving(upstream(whole())) as server, fronting(f"http://127.0.0.1:{server.port}/v1/") as front:
        assert front.send("POST", "/tokenize", {"model": MODEL, "content": "a"}).status == 200
        assert front.send("POST", "/completions", {"model": MODEL, "prompt": "a"}).status == 200
        assert {"/tokenize", "/v1/completions", "/health"} <= set(paths(server))
    with serving(upstream(whole())) as server, fronting(f"http://127.0.0.1:{server.port}/api/v4"):
        assert "/api/v4/models" in paths(server)
