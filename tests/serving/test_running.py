"""Tests of a server's life: loading, draining, and stopping at once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

from llmrun.base.errors import DoesNotFit
from llmrun.serving.processes.served_model import State
from tests.support.serving.fake_model import HOLD, TIMEOUT_S, FakeModel, text
from tests.support.serving.servers import eventually, read_all, read_until, serving

PROGRESS, *ANSWER = text("one", "two")


def stopped(thread: threading.Thread) -> bool:
    thread.join(TIMEOUT_S)
    return not thread.is_alive()


def test_the_front_end_imports_nothing_that_only_engines_need() -> None:
    code = "import sys, llmrun.cli.commands.serve, llmrun.serving.app; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    loaded = {*done.stdout.split()}
    assert {"llmrun.serving.models.known", "starlette"} <= loaded
    assert not loaded & {"llvmlite", "numba", "llama_cpp", "llguidance", "jinja2", "pydantic"}


def test_a_model_that_is_loading_is_reported() -> None:
    model = FakeModel()
    model.openable.clear()
    model.facts, facts, model.state = None, model.facts, State.LOADING
    with serving(model) as server:
        health, chat = server.send("GET", "/health"), server.chat()
        assert (health.status, health.json["status"]) == (503, "loading")
        assert health.error["message"] == "the server is not ready: loading"
        assert (chat.status, chat.error["code"]) == (503, "loading")
        assert "retry-after" in chat.headers
        assert not server.ready.is_set()
        model.facts, model.state = facts, State.READY
        server.call(model.openable.set)
        assert server.ready.wait(TIMEOUT_S)
        assert server.chat().status == 200


def test_a_signal_while_loading_stops_the_server() -> None:
    model = FakeModel()
    model.openable.clear()
    with serving(model) as server:
        server.stop()
        model.wait_for("closed")
        assert not server.ready.is_set()


def test_a_model_that_cannot_be_opened_ends_the_server() -> None:
    model = FakeModel()
    model.broken = DoesNotFit("not enough memory")
    with serving(model, fails=DoesNotFit):
        model.wait_for("closed")


def test_running_requests_finish_after_a_signal() -> None:
    model = FakeModel(lambda number: [PROGRESS, ANSWER[0], HOLD, *ANSWER[1:]])
    with serving(model) as server:
        streamed, whole = server.begin_chat(stream=True), server.begin_chat()
        model.wait_for("held", 2)
        server.stop()
        model.wait_for("draining")
        server.release()
        assert b"data: [DONE]" in read_all(streamed)
        assert b"onetwo" in read_all(whole)
        assert [line for line in server.log if line.startswith("stopping: running answers get up to 30 s")]


def test_waiting_requests_end_after_a_signal() -> None:
    model = FakeModel(lambda number: [HOLD, PROGRESS, *ANSWER])
    with serving(model) as server:
        streamed, whole = server.begin_chat(stream=True), server.begin_chat()
        model.wait_for("held", 2)
        server.stop()
        assert b'"code":"draining"' in read_all(streamed)
        assert read_all(whole).startswith(b"HTTP/1.1 503 ")


def test_requests_end_when_the_time_for_draining_is_over() -> None:
    model = FakeModel(lambda number: [PROGRESS, ANSWER[0], HOLD])
    with serving(model, drain_s=0.05) as server:
        streamed = server.begin_chat(stream=True)
        model.wait_for("held")
        server.stop()
        received = read_all(streamed)
        assert b"one" in received
        assert b'"code":"draining"' in received
        assert b"[DONE]" not in received


def test_a_second_signal_ends_requests_at_once() -> None:
    model = FakeModel(lambda number: [PROGRESS, ANSWER[0], HOLD])
    with serving(model, drain_s=3600) as server:
        streamed = server.begin_chat(stream=True)
        model.wait_for("held")
        server.stop()
        model.wait_for("draining")
        server.stop()
        assert b'"code":"draining"' in read_all(streamed)


def test_draining_servers_refuse_new_requests_and_say_so() -> None:
    model = FakeModel(lambda number: [PROGRESS, ANSWER[0], HOLD, *ANSWER[1:]])
    with serving(model) as server:
        idle = server.connect()
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        read_until(idle, b'{"status":"ok"}')
        running = server.begin_chat(stream=True)
        model.wait_for("held")
        server.stop()
        model.wait_for("draining")
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 503 " in read_until(idle, b'{"status":"draining",')
        eventually(lambda: refused(server.port))
        server.release()
        assert b"[DONE]" in read_all(running)


def refused(port: int) -> bool:
    """Return whether nobody listens on a port."""

    async def connect() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            return True
        writer.close()
        return False

    return asyncio.run(connect())
