"""Tests of the routes that use a model, apart from streams."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from llmrun.base.errors import ContextExceeded, LlmrunError, Unavailable
from llmrun.serving.protocol.openai.responses import ChatAnswer
from tests.support.serving.fake_model import FakeModel, text
from tests.support.serving.servers import CHAT, HELLO, RunningServer, eventually, serving

SECRET = "my most secret prompt"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as running:
        yield running


@pytest.mark.parametrize("path", [CHAT, "/chat/completions"])
def test_chats_are_answered(server: RunningServer, path: str) -> None:
    reply = server.send("POST", path, {**HELLO, "model": "fake"})
    assert reply.json["choices"][0]["message"]["content"] == "Hello there"
    assert reply.json["usage"]["completion_tokens"] == 2
    assert reply.json["id"] == f"chatcmpl-{reply.headers['x-request-id']}"
    assert reply.json["system_fingerprint"] == "fp-fake"


@pytest.mark.parametrize("path", ["/v1/completions", "/completions"])
def test_completions_are_answered(server: RunningServer, path: str) -> None:
    reply = server.send("POST", path, {"prompt": ["once", "twice"], "n": 2})
    assert [choice["text"] for choice in reply.json["choices"]] == ["Hello there"] * 4


def test_fields_without_effect_are_named_in_a_header(server: RunningServer) -> None:
    reply = server.chat(**{"invented": 1, "a\r\nx-evil: 1": 2})
    assert reply.status == 200
    assert "invented" in reply.headers["x-llmrun-ignored"]
    assert "x-evil" not in reply.headers
    assert "x-llmrun-ignored" not in server.chat().headers


@pytest.mark.parametrize("stream", [False, True])
def test_accepted_requests_are_told_their_predicted_wait(server: RunningServer, stream: bool) -> None:
    assert server.chat(stream=stream).headers["x-llmrun-wait"] == "0.250"


@pytest.mark.parametrize("stream", [False, True])
def test_the_predicted_first_token_is_in_a_header(stream: bool) -> None:
    model = FakeModel()
    with serving(model) as server:
        assert "x-llmrun-first-token" not in server.chat(stream=stream).headers  # nothing is predicted from nothing
        model.first_token_s = 12.3456
        assert server.chat(stream=stream).headers["x-llmrun-first-token"] == "12.346"


@pytest.mark.parametrize(("n_words", "threads"), [(3, "same"), (1000, "other")])
def test_long_answers_are_written_off_the_loop(n_words: int, threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    def whole(self: ChatAnswer) -> dict[str, Any]:
        written.append(threading.current_thread().name)
        return known(self)

    known = ChatAnswer.whole
    monkeypatch.setattr(ChatAnswer, "whole", whole)
    model = FakeModel(lambda number: text(*["é "] * n_words))
    with serving(model) as server:
        started: list[str] = []
        server.call(lambda: started.append(threading.current_thread().name))
        reply = server.chat(n=2)
    assert [choice["message"]["content"] for choice in reply.json["choices"]] == ["é " * n_words] * 2
    assert reply.json["usage"]["completion_tokens"] == 2 * n_words
    assert (written == started) == (threads == "same")


def test_calls_with_more_choices_than_the_queue_takes_are_invalid() -> None:
    """A status of 429 would ask the client to try again, forever."""
    model = FakeModel()
    model.most_requests = 3
    with serving(model) as server:
        assert server.chat(n=3).status == 200
        reply = server.chat(n=4)
        prompts = server.send("POST", "/v1/completions", {"prompt": ["a", "b"], "n": 2})
    assert (reply.status, reply.error["param"], prompts.status) == (400, "n", 400)
    assert "4 choices" in reply.error["message"]


def test_other_models_are_not_found(server: RunningServer) -> None:
    reply = server.chat(model="gpt-5")
    assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")
    assert "'fake'" in reply.error["message"]


def test_invalid_fields_are_named(server: RunningServer) -> None:
    reply = server.chat(temperature="hot")
    assert (reply.status, reply.error["param"]) == (400, "temperature")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ContextExceeded("9000 tokens, 4096 fit"), 400, "context_length_exceeded"),
        (Unavailable("restarting", state="restarting"), 503, "restarting"),
        (LlmrunError("anything"), 500, None),
    ],
)
def test_errors_of_the_engine_have_a_status(error: LlmrunError, status: int, code: str | None) -> None:
    model = FakeModel()
    model.refusal = error
    with serving(model) as server:
        reply = server.chat(stream=True)
    assert (reply.status, reply.error["code"]) == (status, code)


def test_bugs_are_a_500_without_details() -> None:
    model = FakeModel()
    with serving(model) as server:
        model.ask = None  # type: ignore[assignment, method-assign]
        reply = server.chat()
        assert (reply.status, reply.error["message"]) == (500, "internal error")
        eventually(lambda: bool(server.traces))
        assert "NoneType" in server.traces.pop()
        assert server.send("GET", "/health").status == 200


def test_texts_become_tokens_and_texts_again(server: RunningServer) -> None:
    tokens = server.send("POST", "/tokenize", {"content": "héy", "add_special": True})
    assert tokens.json == {"tokens": [1, *"héy".encode()], "count": 5, "max_model_len": 4096}
    pieces = server.send("POST", "/tokenize", {"content": "é", "with_pieces": True}).json["tokens"]
    assert pieces == [{"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    assert server.send("POST", "/detokenize", {"tokens": [*"héy".encode()]}).json["content"] == "héy"
    assert server.send("POST", "/detokenize", {"tokens": [195]}).json["content"] == "�"
    assert server.send("POST", "/detokenize", {"tokens": ["a"]}).status == 400
    assert server.send("POST", "/tokenize", {}).error["param"] == "content"


def test_large_requests_are_handled_in_a_thread(server: RunningServer) -> None:
    reply = server.chat(messages=[{"role": "user", "content": "x" * 200_000}])
    assert reply.status == 200


def test_prompts_never_appear_in_the_log() -> None:
    with serving() as server:
        server.chat(messages=[{"role": "user", "content": SECRET}])
        server.chat(messages=[{"role": "user", "content": SECRET}], temperature="hot")
        eventually(lambda: len(server.log) == 2)
    assert SECRET not in "".join(server.log)
    assert "3+2 tokens" in server.log[0]
