"""Tests of servers as workers: our own server, servers that are busy, hostile or gone, and their keys."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from llmrun.base.errors import LlmrunError, ModelNotFound, NetworkError, UsageError
from llmrun.engine.remote.request import parse_endpoint
from llmrun.jobs.batching.driver import identify
from llmrun.jobs.batching.workers import endpoint
from llmrun.jobs.batching.workers.base import CHAT, COMPLETION, RefusedWorker, Reply, WorkerLost
from llmrun.jobs.batching.workers.endpoint import EndpointWorker
from tests.support.servers.hostile_server import Asked, HangUp, serving
from tests.support.serving.fake_model import FakeModel, text
from tests.support.serving.servers import serving as serving_ours

Result = TypeVar("Result")
CARD = {"id": "tiny", "owned_by": "somebody"}
ANSWER = {"choices": [{"message": {"content": "hello"}}]}


def with_worker(
    url: str,
    use: Callable[[EndpointWorker], Any],
    *,
    slots: int = 4,
    probe_s: float = 20.0,
    opens: bool = True,
    note: Callable[[str], None] = lambda words: None,
) -> Any:
    """Open a worker for a server, run the coroutine function `use` with it, and close it."""

    async def run() -> Any:
        worker = EndpointWorker(parse_endpoint(url), slots=slots, note=note, probe_s=probe_s)
        try:
            if opens:
                await worker.start()
            return await use(worker)
        finally:
            await worker.close()

    return asyncio.run(run())


def http(status: int, body: Any, *headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"HTTP/1.1 {status} x", f"Content-Length: {len(data)}", "Connection: close", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + data


def scripted(*answers: bytes) -> Callable[[Asked, socket.socket], None]:
    """Return a script that lists one model, and then answers each call with the next of these responses. The last one
    repeats."""
    left = list(answers)

    def script(asked: Asked, line: socket.socket) -> None:
        if asked.path.endswith("/models"):
            line.sendall(http(200, {"data": [CARD]}))
        else:
            line.sendall(left.pop(0) if len(left) > 1 else left[0])
        raise HangUp

    return script


def answer(worker: EndpointWorker) -> Any:
    return worker.answer(CHAT, {"messages": [], "seed": 5})


def reply_to(*answers: bytes) -> Reply:
    with serving(scripted(*answers)) as server:
        reply = with_worker(server.url, answer)
    assert isinstance(reply, Reply)
    return reply


def test_our_own_server_is_a_worker() -> None:
    model = FakeModel(lambda number: text("Hello", " there"))
    with serving_ours(model) as server:

        async def use(worker: EndpointWorker) -> None:
            identity = await identify(worker, await worker.start())
            assert (identity.model, identity.is_certain, identity.is_foreign) == ("fake", False, False)
            reply = await worker.answer(CHAT, {"messages": [{"role": "user", "content": "Hi"}], "nonsense": 1})
            assert reply.body["choices"][0]["message"]["content"] == "Hello there"
            assert reply.ignored == ("nonsense",)
            bad = await worker.answer(COMPLETION, {"prompt": 5})
            assert (bad.status, bad.body["error"]["param"]) == (400, "prompt")

        with_worker(f"http://127.0.0.1:{server.port}", use)


def test_the_call_names_the_servers_model() -> None:
    with serving(scripted(http(200, ANSWER))) as server:
        with_worker(server.url.removesuffix("#tiny"), answer)
        assert server.asked[-1].body == {"messages": [], "seed": 5, "model": "tiny"}
        assert server.asked[-1].path == "/v1/chat/completions"


def test_the_key_is_sent_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_API_KEY", "secret-key-12345")
    refusal = http(401, {"error": {"message": "bad key secret-key-12345"}})
    with serving(refusal) as server, pytest.raises(NetworkError, match="not authorized") as caught:
        with_worker(server.url, answer)
    assert server.asked[0].headers["authorization"] == "Bearer secret-key-12345"
    assert "secret" not in str(caught.value)
    assert "LLMRUN_API_KEY" in caught.value.hint


@pytest.mark.parametrize(
    ("models", "kind", "words"),
    [
        ({"data": []}, ModelNotFound, "no model tiny"),
        ({"data": [{"id": "a"}, {"id": "b"}]}, ModelNotFound, "no model tiny"),
        ({"data": [{"name": "a"}]}, NetworkError, "did not return a list of models"),
        ({"models": 5}, NetworkError, "did not return a list of models"),
        (b"<html>", NetworkError, "did not return a list of models"),
        (b"[" * 5000, NetworkError, "did not return a list of models"),
    ],
)
def test_a_server_must_have_the_model(models: Any, kind: type[LlmrunError], words: str) -> None:
    with serving(http(200, models)) as server, pytest.raises(kind, match=words):
        with_worker(server.url, answer)


def test_one_of_several_models_must_be_chosen() -> None:
    with serving(http(200, {"data": [{"id": "a"}, {"id": "b"}]})) as server:
        url = server.url.removesuffix("#tiny")
        with pytest.raises(UsageError, match="the server has 2 models: a, b") as caught:
            with_worker(url, answer)
        assert caught.value.hint == f"choose one: {url}#a"


def test_nobody_there_is_one_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(NetworkError, match=f"http://127.0.0.1:{port}/v1: "):
        with_worker(f"http://127.0.0.1:{port}", answer)


@pytest.mark.parametrize("status", [408, 425, 429, 502, 503, 504])
def test_a_busy_server_is_asked_again(status: int) -> None:
    busy = http(status, {"error": {"message": "busy"}}, "retry-after: 0")
    reply = reply_to(busy, busy, http(200, ANSWER))
    assert (reply.status, reply.body) == (200, ANSWER)


def test_the_wait_that_a_server_asks_for_is_bounded() -> None:
    import httpx2

    def wait(**headers: str) -> float:
        return endpoint._retry_after(httpx2.Headers(headers), 7.0)

    assert wait() == 7.0
    assert wait(**{"retry-after": "3", "retry-after-ms": "2500"}) == 2.5
    assert wait(**{"retry-after": "1e9"}) == 30.0
    assert wait(**{"retry-after": "-5"}) == 0.05
    assert wait(**{"retry-after": "nan"}) == wait(**{"retry-after": "Fri, 31 Dec 1999 23:59:59 GMT"}) == 7.0


def test_a_server_that_is_busy_for_ever_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_PATIENCE_S", 0.1)
    with pytest.raises(WorkerLost, match=r"busy for 0 s \(HTTP 429\)"):
        reply_to(http(429, {}, "retry-after: 0"))


@pytest.mark.parametrize("status", [400, 413, 422, 500, 501])
def test_other_errors_are_the_answer(status: int) -> None:
    reply = reply_to(http(status, {"error": {"message": "no", "code": "x"}}))
    assert (reply.status, reply.body) == (status, {"error": {"message": "no", "code": "x"}})


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_needs_another_key_is_of_no_use(status: int) -> None:
    with pytest.raises(RefusedWorker, match=rf"not authorized \(HTTP {status}\)") as caught:
        reply_to(http(status, {}))
    assert caught.value.exit_code == NetworkError.exit_code
    assert caught.value.hint == "set LLMRUN_API_KEY to your key"


def test_redirects_are_not_followed() -> None:
    with pytest.raises(RefusedWorker, match=r"redirected to http://127\.0\.0\.1:1/ \(HTTP 307\)"):
        reply_to(http(307, {}, "Location: http://127.0.0.1:1/"))


def test_an_unknown_route_is_the_answer() -> None:
    assert reply_to(http(404, {"error": {"message": "no such route"}})).body == {"error": {"message": "no such route"}}


def test_a_model_that_is_gone_loses_the_server() -> None:
    lists = [{"data": [CARD]}, {"data": [{"id": "another"}]}]

    def script(asked: Asked, line: socket.socket) -> None:
        line.sendall(http(200, lists.pop(0)) if asked.path.endswith("/models") else http(404, {}))
        raise HangUp

    with serving(script) as server, pytest.raises(WorkerLost, match="no longer has the model"):
        with_worker(server.url, answer)


def test_the_key_is_not_in_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_API_KEY", "secret-key-12345")
    echoed = {"error": {"message": "invalid key: Bearer secret-key-12345", "detail": ["\\u0073ecret-key-12345"]}}
    reply = reply_to(http(400, json.dumps(echoed).replace("\\\\u", "\\u").encode()))
    assert reply.body["error"] == {"message": "invalid key: Bearer (the key)", "detail": ["(the key)"]}


def test_a_busy_server_is_told_once() -> None:
    busy, notes = http(429, {}, "retry-after: 0"), list[str]()
    with serving(scripted(busy, busy, http(200, ANSWER))) as server:
        with_worker(server.url, answer, note=notes.append)
    assert [note.partition("#tiny: ")[2] for note in notes] == ["busy (HTTP 429), trying again"]


def test_an_endless_list_of_models_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_MOST_MODELS", 1000)
    with serving(http(200, b" " * 5000)) as server, pytest.raises(NetworkError, match="more than 1,000 bytes"):
        with_worker(server.url, answer)


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"choices": 5}', b"\xff", b'{"choices": ["\\ud800"]}'])
def test_an_answer_that_is_none_is_an_error(body: bytes) -> None:
    reply = reply_to(http(200, body))
    assert reply.status == 502
    assert "error" in reply.body


@pytest.mark.parametrize("body", [b"oops", b'{"error": null}', b"{}", b'{"error": "text"}'])
def test_an_error_without_words_gets_some(body: bytes) -> None:
    message = reply_to(http(500, body)).body["error"]["message"]
    assert "HTTP 500" in message or "the response is not valid JSON" in message


def test_an_endless_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_MOST_BYTES", 1000)
    reply = reply_to(http(200, b" " * 5000))
    assert "more than 1,000 bytes" in reply.body["error"]["message"]


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200 x\r\nContent-Length: 50\r\n\r\n{", b"nonsense\r\n\r\n"])
def test_a_connection_that_breaks_loses_the_server(data: bytes) -> None:
    with pytest.raises(WorkerLost):
        reply_to(data)


def test_another_model_behind_the_same_address_is_noticed() -> None:
    """A server that was restarted with another model must not answer for the first one."""
    card = {**CARD, "owned_by": "llmrun", "system_fingerprint": "fp_1"}

    def script(asked: Asked, line: socket.socket) -> None:
        is_list = asked.path.endswith("/models")
        line.sendall(http(200, {"data": [card]} if is_list else {**ANSWER, "system_fingerprint": "fp_2"}))
        raise HangUp

    with serving(script) as server, pytest.raises(WorkerLost, match="restarted with another model"):
        with_worker(server.url, answer)


@pytest.mark.push
def test_a_slow_answer_is_waited_for_as_long_as_the_server_is_there() -> None:
    def script(asked: Asked, line: socket.socket) -> None:
        if asked.path.endswith("/models"):
            line.sendall(http(200, {"data": [CARD]}))
        else:
            time.sleep(0.5)
            line.sendall(http(200, ANSWER))
        raise HangUp

    with serving(script) as server:
        assert with_worker(server.url, answer, probe_s=0.1).status == 200
        assert sum(asked.path.endswith("/models") for asked in server.asked) > 2


@pytest.mark.push
def test_a_server_that_hangs_is_lost() -> None:
    hangs: list[bool] = []

    def script(asked: Asked, line: socket.socket) -> None:
        if asked.path.endswith("/models") and not hangs:
            line.sendall(http(200, {"data": [CARD]}))
            raise HangUp
        hangs.append(True)
        time.sleep(2)
        raise HangUp

    with serving(script) as server, pytest.raises(WorkerLost, match=r"no answer within 0\.2 s"):
        with_worker(server.url, answer, probe_s=0.2)


def test_a_server_that_never_answers_cannot_be_opened() -> None:
    def script(asked: Asked, line: socket.socket) -> None:
        del asked, line
        time.sleep(1)
        raise HangUp

    with serving(script) as server, pytest.raises(NetworkError, match=r"did not list its models within 0\.1 s"):
        with_worker(server.url, answer, probe_s=0.1)


def test_a_worker_that_is_closed_is_lost() -> None:
    with serving(scripted(http(200, ANSWER))) as server, pytest.raises(WorkerLost, match="closed"):
        with_worker(server.url, answer, opens=False)
