"""Tests of the routes of Ollama's API with a fake model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from llmrun import __version__
from llmrun.base.errors import BackendCrashed, ContextExceeded, Overloaded, Unavailable
from llmrun.serving.options import Limits, ServingOptions
from llmrun.serving.protocol.openai.options import seed_from
from llmrun.serving.protocol.openapi import MISSING
from tests.support.servers.hostile_server import response
from tests.support.servers.hostile_server import serving as upstream_serving
from tests.support.serving.fake_model import FACTS, HOLD, FakeModel, text
from tests.support.serving.fake_upstream import MODEL, upstream
from tests.support.serving.fronts import fronting
from tests.support.serving.servers import Reply, RunningServer, eventually, post, read_until, serving

CHAT, GENERATE = "/api/chat", "/api/generate"
HELLO: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}]}
KEY = "a-key-of-16-letters"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as running:
        yield running


def lines(reply: Reply) -> list[Any]:
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [*map(json.loads, reply.body.splitlines())]


def test_answers_are_streamed_as_lines(server: RunningServer) -> None:
    reply = server.send("POST", CHAT, HELLO)
    chunks = lines(reply)
    assert [chunk["message"]["content"] for chunk in chunks] == ["Hello", " there", ""]
    assert [chunk["done"] for chunk in chunks] == [False, False, True]
    assert {chunk["model"] for chunk in chunks} == {"fake"}
    assert chunks[-1]["seed"] == seed_from(reply.headers["x-request-id"])
    assert reply.body.endswith(b"}\n")


def test_whole_answers_are_one_object(server: RunningServer) -> None:
    reply = server.send("POST", GENERATE, {"model": "fake:latest", "prompt": "Hello", "stream": False})
    assert (reply.json["response"], reply.json["done_reason"]) == ("Hello there", "stop")
    assert reply.headers["content-type"] == "application/json"


def test_fields_without_effect_are_named_in_a_header(server: RunningServer) -> None:
    reply = server.send("POST", CHAT, {**HELLO, "options": {"num_gpu": 1}, "invented": 1, "keep_alive": -1})
    assert reply.headers["x-llmrun-ignored"] == "invented, options.num_gpu"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, HELLO),
        (CHAT, {"messages": []}),
        (GENERATE, {"prompt": "Hello"}),
        ("/api/embed", {"input": "Hello"}),
        ("/api/embeddings", {"prompt": "Hello"}),
    ],
)
def test_a_header_names_the_context_if_clients_want_more(
    server: RunningServer, path: str, fields: dict[str, Any], stream: bool
) -> None:
    replies = [server.send("POST", path, {**fields, "stream": stream, "options": {"num_ctx": n}}) for n in (8192, 4096)]
    assert [reply.headers["x-llmrun-context"] for reply in replies] == ["4096", None]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({**HELLO, "model": "other"}, "no such model: 'other'; this server has 'fake'"),
        ({**HELLO, "options": {"num_ctx": "8192"}}, 'options.num_ctx: expected an integer, got "8192"'),
        ({**HELLO, "keep_alive": "soon"}, "keep_alive: expected a number of seconds"),
        (b"{", "the request body is not valid JSON"),
    ],
)
def test_errors_have_ollamas_form(server: RunningServer, body: Any, words: str) -> None:
    reply = server.send("POST", CHAT, body)
    assert reply.status in (400, 404)
    assert {*reply.json} == {"error"}
    assert reply.json["error"].startswith(words)


def test_unknown_paths_and_refusals_have_ollamas_form() -> None:
    with serving(options=ServingOptions(keys=(KEY,))) as server:
        assert server.send("GET", "/api/tags").json == {
            "error": "an API key is required: send Authorization: Bearer KEY"
        }
        known = {"authorization": f"Bearer {KEY}"}
        assert server.send("GET", "/api/invented", headers=known).json["error"].startswith("no such path")
        assert server.send("GET", CHAT, headers=known).json == {"error": "GET is not allowed for '/api/chat'"}


@pytest.mark.parametrize("path", MISSING)
@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_missing_routes_say_what_to_do_instead(server: RunningServer, path: str, method: str) -> None:
    reply = server.send(method, path.replace("{digest}", "sha256:0"), {"model": "fake"})
    assert (reply.status, reply.json) == (501, {"error": MISSING[path]})


@pytest.mark.parametrize(
    ("refusal", "status"),
    [(Overloaded("x", retry_after=3.0), 429), (Unavailable("x", state="loading"), 503), (ContextExceeded("x"), 400)],
)
def test_refusals_before_the_stream_have_a_status(refusal: Exception, status: int) -> None:
    model = FakeModel()
    model.refusal = refusal  # type: ignore[assignment]
    with serving(model) as server:
        reply = server.send("POST", CHAT, HELLO)
    assert (reply.status, [*reply.json]) == (status, ["error"])


def test_a_failed_stream_ends_with_the_error() -> None:
    with serving(FakeModel(lambda number: [*text("one")[:2], BackendCrashed("x")])) as server:
        one, error = lines(server.send("POST", CHAT, HELLO))
    assert one["message"]["content"] == "one"
    assert error == {"error": "the model's process crashed while it worked on this request"}


def test_silent_streams_are_kept_alive_by_spaces() -> None:
    """A space before a line of JSON is part of the JSON, so that no client notices it."""
    model = FakeModel(lambda number: [HOLD, *text("Hello")])
    with serving(model, ServingOptions(limits=Limits(ping_s=0.02))) as server, server.connect() as line:
        line.sendall(post(CHAT, HELLO))
        seen = read_until(line, b"1\r\n \r\n1\r\n \r\n")
        server.release()
        seen += read_until(line, b'"done":true')
    assert b"1\r\n \r\n" in seen
    assert b"\n\n" not in seen.partition(b"\r\n\r\n")[2]


def test_clients_that_leave_are_noticed() -> None:
    model = FakeModel(lambda number: [*text("Hello")[:2], HOLD])
    with serving(model) as server:
        with server.connect() as line:
            line.sendall(post(CHAT, HELLO))
            read_until(line, b"Hello")
        model.wait_for("cancelled")


def test_clients_learn_that_a_server_is_running(server: RunningServer) -> None:
    reply = server.send("HEAD", "/")
    assert (reply.status, reply.body) == (200, b"")
    assert server.send("HEAD", "/api/tags").status == server.send("HEAD", "/api/version").status == 200


def test_the_version_is_that_of_the_api(server: RunningServer) -> None:
    """VS Code requires 0.6.4, and Open WebUI compares the numbers."""
    found = server.send("GET", "/api/version").json
    assert tuple(map(int, found["version"].split("."))) > (0, 6, 4)
    assert found["llmrun"] == __version__


def test_models_are_listed(server: RunningServer) -> None:
    (model,) = server.send("GET", "/api/tags").json["models"]
    assert (model["name"], model["model"]) == ("fake", "fake")
    assert model["details"] == {
        "parent_model": "",
        "format": "gguf",
        "family": "fake",
        "families": ["fake"],
        "parameter_size": "",
        "quantization_level": "F32",
        "context_length": 4096,
    }
    assert len(model["digest"]) == 64
    assert model["modified_at"] == "1970-01-01T00:00:00.000000Z"


def test_loaded_models_are_listed_with_their_end() -> None:
    model = FakeModel()
    info = replace(FACTS.info, gpu_layers="5/10", file_bytes=1000)
    model.facts = structs.replace(FACTS, info=info, memory_bytes=300)
    with serving(model) as server:
        (found,) = server.send("GET", "/api/ps").json["models"]
        assert (found["size"], found["size_vram"], found["context_length"]) == (800, 500, 4096)
        assert found["expires_at"] == "9999-01-01T00:00:00.000000Z"
        assert server.send("POST", CHAT, {**HELLO, "keep_alive": "1h"}).status == 200
        (found,) = server.send("GET", "/api/ps").json["models"]
    assert found["expires_at"] < "9999"


def test_models_are_unloaded_on_request() -> None:
    model = FakeModel()
    with serving(model) as server:
        reply = server.send("POST", CHAT, {"model": "fake", "keep_alive": 0})
        assert (reply.json["done"], reply.json["done_reason"]) == (True, "unload")
        eventually(lambda: server.send("GET", "/api/ps").json == {"models": []})
        assert model.counted("closed") == 1
        reply = server.send("POST", GENERATE, {"model": "fake", "prompt": ""})
        assert (reply.json["response"], reply.json["done_reason"]) == ("", "load")
        assert len(server.send("GET", "/api/ps").json["models"]) == 1
        assert server.send("POST", CHAT, {"model": "other", "keep_alive": 0}).status == 404


def test_models_are_unloaded_after_their_last_answer() -> None:
    model = FakeModel()
    with serving(model) as server:
        assert lines(server.send("POST", CHAT, {**HELLO, "keep_alive": 0}))[-1]["done"]
        eventually(lambda: server.send("GET", "/api/ps").json == {"models": []})


def test_models_are_shown_under_both_names_of_the_field(server: RunningServer) -> None:
    shown = server.send("POST", "/api/show", {"model": "fake"})
    assert shown.json == server.send("POST", "/api/show", {"name": "fake", "verbose": False}).json
    assert shown.json["capabilities"] == ["completion", "insert"]
    assert shown.json["model_info"]["general.architecture"] == "fake"
    assert shown.json["model_info"]["fake.context_length"] == 4096
    assert "num_ctx                        4096\n" in shown.json["parameters"]
    assert server.send("POST", "/api/show", {"model": "other"}).status == 404
    assert server.send("POST", "/api/show", {}).json == {"error": "model: this field is required"}
    reply = server.send("POST", "/api/show", {"model": "fake", "verbose": True})
    assert reply.headers["x-llmrun-ignored"] == "verbose"


def test_models_of_upstreams_are_listed_and_asked() -> None:
    chat = response(b'{"message":{"role":"assistant","content":"Hi"},"done":true}\n', kind="application/x-ndjson")
    script = upstream(chat, created=1_700_000_000, max_model_len=512)
    with upstream_serving(script) as other, fronting(f"http://127.0.0.1:{other.port}/v1") as server:
        eventually(lambda: len(server.send("GET", "/api/tags").json["models"]) == 2)
        own, found = server.send("GET", "/api/tags").json["models"]
        assert (own["name"], found["name"]) == ("fake", MODEL)
        assert (found["modified_at"], found["details"]["context_length"]) == ("2023-11-14T22:13:20.000000Z", 512)
        for fields in ({}, {"stream": None}, {"stream": True}):
            (answer,) = lines(server.send("POST", CHAT, {**HELLO, "model": MODEL, **fields}))
            assert answer["message"]["content"] == "Hi"
        assert server.send("POST", "/api/pull", {"model": MODEL}).status == 501
        assert not any(asked.path == "/api/pull" for asked in other.asked)
