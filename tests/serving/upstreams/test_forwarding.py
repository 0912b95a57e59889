"""Tests of forwarding a request, and of moving it when an upstream fails."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from llmrun.serving.upstreams.pool import PACE
from tests.support.servers.hostile_server import (
    HELLO,
    Asked,
    HangUp,
    HostileServer,
    event,
    response,
    said,
    serving,
    wait_for_hang_up,
)
from tests.support.servers.rpc_server import closed_port
from tests.support.serving.fake_model import TIMEOUT_S
from tests.support.serving.fake_upstream import MODEL, chunked, refusal, whole
from tests.support.serving.fronts import behind, fronting, last_line, posts
from tests.support.serving.servers import RunningServer, eventually, read_until

ROLE = said("", role="assistant")
KEY = "sk-0123456789abcdef"


def test_whole_answers_are_passed_on_unchanged() -> None:
    with behind(whole("é\u2028")) as (front, server):
        reply = front.chat(model=MODEL, seed=7, temperature=0.5)
        assert (reply.status, reply.body) == (200, whole("é\u2028").partition(b"\r\n\r\n")[2])
        (asked,) = posts(server)
        assert asked.path == "/v1/chat/completions"
        assert asked.body["seed"] == 7
        assert f"via 127.0.0.1:{server.port}" in last_line(front)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/rerank", "/api/embed", "/tokenize"])
def test_routes_without_streams_ignore_the_wish_for_one(path: str) -> None:
    with behind(response(b"{}", kind="application/json")) as (front, _):
        reply = front.send("POST", path, {"model": MODEL, "stream": True})
        assert (reply.status, reply.body) == (200, b"{}")


def test_streams_are_passed_on_unchanged() -> None:
    with behind(chunked(b": ping\n\n", HELLO, is_complete=True)) as (front, _):
        reply = front.chat(model=MODEL, stream=True)
        assert (reply.status, reply.body) == (200, HELLO)
        assert reply.headers["content-type"] == "text/event-stream"
        assert reply.headers["x-accel-buffering"] == "no"


def test_no_secrets_of_the_client_go_out() -> None:
    with behind(whole(), client_keys=[KEY], key="upstream-key") as (front, server):
        secrets = {"authorization": f"Bearer {KEY}", "cookie": "session=1", "x-api-key": KEY, "x-custom": "secret"}
        body = {"messages": [], "model": MODEL}
        assert front.send("POST", "/v1/chat/completions", body, {**secrets, "last-event-id": ""}).status == 200
        (asked,) = posts(server)
        assert asked.headers["authorization"] == "Bearer upstream-key"
        assert KEY not in str(asked)
        allowed = {"host", "accept", "accept-encoding", "authorization", "connection", "content-length", "content-type"}
        assert set(asked.headers) <= allowed | {"user-agent", "via", "last-event-id"}
        assert not {"cookie", "x-api-key", "x-custom"} & set(asked.headers)


def test_headers_of_the_upstream_do_not_pass_unless_they_are_known() -> None:
    headers = {"Set_Cookie": "a=b", "X_Secret": "1", "X_LLMRUN_Wait": "0.5", "X_LLMRUN_Ignored": "foo"}
    headers["X_LLMRUN_Context"] = "4096"
    answer = response(b"{}", kind="application/json", **headers)
    with behind(answer) as (front, _):
        reply = front.chat(model=MODEL)
        assert (reply.headers["x-llmrun-wait"], reply.headers["x-llmrun-ignored"]) == ("0.5", "foo")
        assert reply.headers["x-llmrun-context"] == "4096"
        assert "set-cookie" not in reply.headers
        assert "x-secret" not in reply.headers


@pytest.mark.push
@pytest.mark.parametrize(
    "failure",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
        refusal("500 Oops"),
        refusal("503 Draining", code="draining"),
        refusal("429 Too many", headers={"Retry_After": "9"}),
        refusal("404 Not found", code="model_not_found"),
        refusal("401 Unauthorized"),
        response(b"<html>", kind="text/html"),
        response(b"", status="307 Redirect", Location="http://127.0.0.1:1/"),
        response(b"\x1f\x8b", kind="application/json", Content_Encoding="gzip"),
        response(b"[1]", kind="application/json"),
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000,
    ],
    ids=lambda data: repr(data[:24]),
)
def test_whole_answers_move_on_any_failure(failure: bytes) -> None:
    with behind(failure, whole()) as (front, broken, _):
        assert b"fine" in front.chat(model=MODEL).body
        assert len(posts(broken)) in (1, 2)  # the second time on a new connection
        assert last_line(front).count("127.0.0.1:") == 2


@pytest.mark.parametrize(
    "failure",
    [
        chunked(ROLE),
        chunked(ROLE, is_complete=True),
        chunked(ROLE, event({"error": {"message": "x", "type": "server_error", "code": "draining"}}), is_complete=True),
        chunked(ROLE, event(b"{")),
        chunked(event(b"{" + b"x" * (5 << 20))),
        whole(),
    ],
    ids=["cut", "empty", "draining", "garbage", "huge event", "not a stream"],
)
def test_streams_move_before_their_first_token(failure: bytes) -> None:
    with behind(failure, chunked(HELLO, is_complete=True)) as (front, *_):
        assert front.chat(model=MODEL, stream=True).body == HELLO


def test_large_requests_in_progress_are_limited() -> None:
    go_on, arrived = threading.Event(), threading.Semaphore(0)

    def slow(asked: Asked, connection: socket.socket) -> None:
        arrived.release()
        assert go_on.wait(TIMEOUT_S)
        connection.sendall(whole())

    long = [{"role": "user", "content": "x" * 100_000}]
    with behind(slow, bodies_bytes=250_000) as (front, _):
        line = front.begin_chat(model=MODEL, messages=long)
        assert arrived.acquire(timeout=TIMEOUT_S)
        refused = front.chat(model=MODEL, messages=[*long, *long])
        assert (refused.status, refused.error["code"]) == (503, "server_overloaded")
        go_on.set()
        read_until(line, b"fine")
        line.close()
        eventually(lambda: front.service.bodies.held == 0)
        assert front.chat(model=MODEL, messages=[*long, *long]).status == 200


def test_a_server_that_is_not_ready_is_waited_for() -> None:
    answers = [refusal("503 Loading", code="loading"), whole()]

    def loading(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(answers.pop(0))

    with behind(loading) as (front, _):
        assert front.chat(model=MODEL).status == 200


def test_errors_about_the_request_are_passed_on() -> None:
    answer = refusal("400 Bad", "temperature: too hot", type="invalid_request_error", param="temperature")
    with behind(answer, whole()) as (front, _, second):
        reply = front.chat(model=MODEL)
        assert (reply.status, reply.error["message"]) == (400, "temperature: too hot")
        assert posts(second) == []


def test_requests_that_crash_an_engine_do_not_move() -> None:
    answer = refusal("500 Oops", code="backend_crashed", headers={"X_Should_Retry": "false"})
    with behind(answer, whole()) as (front, _, second):
        reply = front.chat(model=MODEL)
        assert (reply.status, reply.headers["x-should-retry"]) == (500, "false")
        assert posts(second) == []


def test_a_request_that_crashes_upstreams_moves_three_times() -> None:
    with behind(b"", b"", b"", b"", b"", b"") as (front, *servers):
        reply = front.chat(model=MODEL)
        assert (reply.status, reply.error["code"]) == (503, "upstream_failed")
        assert "retry-after" in reply.headers
        assert sum(bool(posts(server)) for server in servers) == 4


def test_the_shortest_wait_of_full_upstreams_is_passed_on() -> None:
    full = [refusal("429 Full", f"wait {wait}", {"Retry_After": wait}) for wait in ("30", "7", "60")]
    with behind(*full) as (front, *servers):
        reply = front.chat(model=MODEL)
        assert (reply.status, reply.headers["retry-after"], reply.error["message"]) == (429, "7", "wait 7")
        assert [len(posts(server)) for server in servers] == [1, 1, 1]


def test_keys_in_errors_are_redacted() -> None:
    answer = refusal("400 Bad", f"the key {KEY} may not do this", type="invalid_request_error")
    with behind(answer, key=KEY) as (front, _):
        assert front.chat(model=MODEL).error["message"] == "the key (the key) may not do this"


def test_a_refused_key_is_not_the_clients_fault() -> None:
    with behind(refusal("401 Unauthorized", f"wrong key {KEY}"), key=KEY) as (front, _):
        reply = front.chat(model=MODEL)
        assert (reply.status, reply.error["code"]) == (502, "upstream_failed")
        assert "--upstream-key-file" in reply.error["message"]
        assert KEY not in reply.body.decode()


def test_redirects_are_never_followed() -> None:
    with serving(whole()) as elsewhere:
        moved = response(b"", status="302 Found", Location=f"http://127.0.0.1:{elsewhere.port}/v1/chat/completions")
        with behind(moved) as (front, _):
            reply = front.chat(model=MODEL)
            assert (reply.status, reply.error["code"]) == (502, "upstream_failed")
            assert "redirected (HTTP 302)" in reply.error["message"]
        assert elsewhere.asked == []


@pytest.mark.push
@pytest.mark.parametrize(
    ("coding", "most"),
    [("Transfer-Encoding: chunked\r\n", "67,108,864"), ("", "4,194,304")],
    ids=["chunked", "no length"],
)
def test_bodies_that_never_end_are_cut_off(coding: str, most: str) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n{coding}".encode()

    def flood(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(head + b"\r\n")
        while True:
            connection.sendall(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")

    with behind(flood) as (front, server):
        reply = front.chat(model=MODEL)
        assert reply.status == 502
        assert f"more than {most} bytes" in reply.error["message"]
        assert server.hung_up.wait(TIMEOUT_S)


def test_silent_streams_have_pings_before_the_first_token() -> None:
    go_on = threading.Event()

    def slow(asked: Asked, connection: socket.socket) -> None:
        assert go_on.wait(TIMEOUT_S)
        connection.sendall(chunked(HELLO, is_complete=True))

    with behind(slow, ping_s=0.05) as (front, _):
        line = front.begin_chat(model=MODEL, stream=True)
        head = read_until(line, b": ping\n\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        go_on.set()
        assert b"[DONE]" in read_until(line, b"[DONE]")
        line.close()


@pytest.mark.push
def test_an_error_after_a_ping_is_an_event() -> None:
    def refuse_late(asked: Asked, connection: socket.socket) -> None:
        time.sleep(0.5)
        connection.sendall(refusal("400 Bad", "too hot", type="invalid_request_error"))

    with behind(refuse_late, ping_s=0.02) as (front, _):
        reply = front.chat(model=MODEL, stream=True)
        assert reply.status == 200
        error = json.loads(reply.body.rpartition(b"data: ")[2])["error"]
        assert (error["message"], error["type"]) == ("too hot", "invalid_request_error")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_the_request(stream: bool) -> None:
    arrived = threading.Event()

    def hold(asked: Asked, connection: socket.socket) -> None:
        arrived.set()
        wait_for_hang_up(servers[0], connection)

    servers: list[HostileServer] = []
    with behind(hold) as (front, server):
        servers.append(server)
        line = front.begin_chat(model=MODEL, stream=stream)
        assert arrived.wait(TIMEOUT_S)
        line.close()
        assert server.hung_up.wait(TIMEOUT_S)
        assert "client left" in last_line(front)
        assert b"requests_in_flight{upstream=" in (text := front.send("GET", "/metrics").body)
        assert b"} 1" not in b"".join(one for one in text.splitlines() if b"in_flight" in one)


def test_a_drained_server_finishes_forwarded_requests() -> None:
    arrived, go_on = threading.Event(), threading.Event()

    def slow(asked: Asked, connection: socket.socket) -> None:
        arrived.set()
        assert go_on.wait(TIMEOUT_S)
        connection.sendall(whole())

    with behind(slow) as (front, _):
        line = front.begin_chat(model=MODEL)
        assert arrived.wait(TIMEOUT_S)
        front.stop()
        eventually(lambda: any("stopping" in words for words in front.log))
        go_on.set()
        assert b"fine" in read_until(line, b"fine")
        line.close()


def test_the_end_of_draining_is_an_error() -> None:
    arrived = threading.Event()

    def hold(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(chunked(said("Hel")))
        arrived.set()
        connection.recv(1)
        raise HangUp

    with behind(hold, drain_s=0.1) as (front, _):
        line = front.begin_chat(model=MODEL, stream=True)
        read_until(line, b"Hel")
        front.stop()
        assert b'"code":"draining"' in read_until(line, b"draining")
        line.close()


def test_upstreams_that_are_down_give_503() -> None:
    notes: list[str] = []
    with fronting(f"http://127.0.0.1:{closed_port()}", notes=notes) as front:
        reply = front.chat(model=MODEL)
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "no_upstream", "5")
        assert front.chat().status == 200, "the server's own model"
        assert len(notes) == 1
        assert "down: unreachable" in notes[0]


def test_unknown_models_are_not_found() -> None:
    with behind(whole()) as (front, server):
        reply = front.chat(model="nothing")
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")
        assert posts(server) == []


def test_names_are_found_in_any_case_and_with_latest() -> None:
    with behind(whole(), traits=({"model": "Tiny:latest"},)) as (front, server):
        assert front.chat(model="tiny").status == 200
        assert posts(server)[0].body["model"] == "Tiny:latest"


def test_paths_that_name_something_else_are_not_forwarded() -> None:
    with behind(whole()) as (front, server):
        assert front.send("POST", "/v1/responses/resp_1/cancel").status == 404
        assert posts(server) == []


def test_idle_connections_may_be_closed() -> None:
    """A server that closes its idle connection while the next request is on its way is not down."""
    used: set[int] = set()

    def once(asked: Asked, connection: socket.socket) -> None:
        if asked.connection in used:
            raise HangUp
        used.add(asked.connection)
        connection.sendall(whole())

    with behind(once, whole()) as (front, first, second):
        assert front.service.upstreams is not None
        messages = [{"role": "user", "content": "Hello " * 50}]
        for _ in range(5):
            assert front.chat(model=MODEL, messages=messages).status == 200
        assert posts(second) == []
        assert len(used) == 5
        assert len(posts(first)) > 5  # some came on connections that were closed
        assert front.service.upstreams.all[0].is_up


def test_conversations_stay_with_one_upstream() -> None:
    with behind(whole(), whole(), pace=PACE) as (front, *servers):  # a busy machine may miss quick questions
        for topic in ("a", "b", "c", "d"):
            messages = []
            for turn in range(4):
                messages.append({"role": "user", "content": f"{topic}{turn} " * 50})
                assert front.chat(model=MODEL, messages=messages).status == 200
        topics = [{asked.body["messages"][0]["content"][0] for asked in posts(server)} for server in servers]
        assert topics[0].isdisjoint(topics[1])
        assert [len(each) for each in topics] == [2, 2]


def test_requests_go_to_the_server_with_less_load() -> None:
    arrived, go_on = threading.Semaphore(0), threading.Event()

    def slow(asked: Asked, connection: socket.socket) -> None:
        arrived.release()
        assert go_on.wait(TIMEOUT_S)
        connection.sendall(whole())

    with behind(slow, slow) as (front, *servers):
        lines = [front.begin_chat(model=MODEL) for _ in range(10)]
        for _ in lines:
            assert arrived.acquire(timeout=TIMEOUT_S)
        assert [len(posts(server)) for server in servers] == [5, 5]
        go_on.set()
        for line in lines:
            read_until(line, b"fine")
            line.close()


def test_the_listed_models_are_those_that_can_be_named(front_of_two: RunningServer) -> None:
    listed = front_of_two.send("GET", "/v1/models").json["data"]
    assert [model["id"] for model in listed] == ["fake", MODEL, "other"]
    assert all("via" not in model for model in listed)
    assert front_of_two.send("GET", f"/v1/models/{MODEL}").json["system_fingerprint"] == "fp-1"
    of_anthropic = front_of_two.send("GET", "/v1/models", headers={"anthropic-version": "2023-06-01"}).json
    assert [model["id"] for model in of_anthropic["data"]] == ["fake", MODEL, "other"]
    assert front_of_two.send("GET", "/v1/models/nothing").status == 404


@pytest.fixture
def front_of_two() -> Iterator[RunningServer]:
    with behind(whole(), whole(), whole(), traits=({}, {}, {"model": "other"})) as (front, *_):
        yield front
