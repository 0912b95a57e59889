"""Tests of embeddings and rankings over HTTP, in the forms of OpenAI, Jina and Ollama."""

from __future__ import annotations

import base64
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmrun.backends.scripted import HIDDEN_SIZE
from llmrun.base.errors import ContextExceeded, Unavailable
from tests.support.models.tiny_encoders import TINY_RERANKERS, tiny_encoder
from tests.support.serving.fake_model import FakeModel
from tests.support.serving.serve_process import Served, served
from tests.support.serving.servers import RunningServer, serving


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """The fake model's vectors are [length of the text, 0.5], and its scores are the lengths of the documents."""
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def real() -> Iterator[Served]:
    with served("scripted", "--backend", "scripted") as running:
        yield running


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
def test_texts_and_tokens_get_vectors(server: RunningServer, path: str) -> None:
    reply = server.send("POST", path, {"input": ["a", "bcd"], "user": "me", "model": "fake"})
    assert reply.status == 200
    assert reply.json == {
        "object": "list",
        "model": "fake",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [1.0, 0.5]},
            {"object": "embedding", "index": 1, "embedding": [3.0, 0.5]},
        ],
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }
    assert reply.headers["x-llmrun-ignored"] == "user"
    for body in ({"input": "ab"}, {"input": [1, 2]}, {"input": [[1, 2]]}):
        assert [each["embedding"] for each in server.send("POST", path, body).json["data"]] == [[2.0, 0.5]]


def test_vectors_can_be_base64(server: RunningServer) -> None:
    reply = server.send("POST", "/v1/embeddings", {"input": "ab", "encoding_format": "base64"})
    assert struct.unpack("<2f", base64.b64decode(reply.json["data"][0]["embedding"])) == (2.0, 0.5)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v1/reranking", "/reranking"])
def test_the_best_documents_come_first(server: RunningServer, path: str) -> None:
    body = {"query": "q", "documents": ["a", {"text": "bcd"}, "ef"]}
    reply = server.send("POST", path, body).json
    assert [(each["index"], each["relevance_score"]) for each in reply["results"]] == [(1, 3.0), (2, 2.0), (0, 1.0)]
    assert reply["usage"]["prompt_tokens"] == 6
    best = server.send("POST", path, {**body, "top_n": 1, "return_documents": True}).json["results"]
    assert best == [{"index": 1, "relevance_score": 3.0, "document": {"text": "bcd"}}]


@pytest.mark.parametrize("fields", [{}, {"input": None}, {"input": ""}, {"input": []}])
def test_ollama_s_routes_load_the_model_without_input(server: RunningServer, fields: dict[str, Any]) -> None:
    reply = server.send("POST", "/api/embed", {**fields, "keep_alive": "5m"})
    assert (reply.status, reply.json["embeddings"], reply.json["prompt_eval_count"]) == (200, [], 0)
    prompt = {"prompt": fields["input"]} if isinstance(fields.get("input"), str) else {}
    assert server.send("POST", "/api/embeddings", prompt).json == {"embedding": []}
    assert server.send("POST", "/v1/embeddings", {"input": []}).status == 400


def test_an_empty_text_among_others_has_a_vector(server: RunningServer) -> None:
    assert len(server.send("POST", "/api/embed", {"input": ["", "a"], "dimensions": 0}).json["embeddings"]) == 2


def test_ollama_s_routes_have_its_form(server: RunningServer) -> None:
    reply = server.send("POST", "/api/embed", {"input": ["a", "bc"], "keep_alive": "5m"}).json
    assert reply["embeddings"] == [[1.0, 0.5], [2.0, 0.5]]
    assert (reply["model"], reply["prompt_eval_count"], reply["total_duration"] > 0) == ("fake", 3, True)
    assert server.send("POST", "/api/embeddings", {"prompt": "abc"}).json == {"embedding": [3.0, 0.5]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": 1}, "input"),
        ("/v1/embeddings", {"input": ["a", 1]}, "input[1]"),
        ("/v1/embeddings", {"input": [[1], [10_000]]}, "input[1][0]"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "q"}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": [{"title": "a"}]}, "documents[0].text"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
    ],
)
def test_invalid_fields_are_named(server: RunningServer, path: str, body: dict[str, object], param: str) -> None:
    reply = server.send("POST", path, body)
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.push
def test_too_many_tokens_are_refused_before_they_reach_the_model(server: RunningServer) -> None:
    before = len(server.model.embedded)
    reply = server.send("POST", "/v1/embeddings", {"input": [[1] * 600_000] * 2})
    assert (reply.status, "1,200,000 or more, the limit" in reply.error["message"]) == (400, True)
    assert len(server.model.embedded) == before


@pytest.mark.parametrize(
    ("error", "status"),
    [(ContextExceeded("input 0 does not fit"), 400), (Unavailable("gone", state="restarting"), 503)],
)
def test_the_model_s_errors_are_the_answer(error: Exception, status: int) -> None:
    model = FakeModel()
    model.embedding_error = error
    with serving(model) as running:
        reply = running.send("POST", "/v1/embeddings", {"input": "a"})
    assert reply.status == status


def test_tenants_and_wishes_reach_the_model(server: RunningServer) -> None:
    server.send("POST", "/v1/embeddings", {"input": "a", "dimensions": 1, "truncate": True})
    wanted = server.model.embedded[-1]
    assert (wanted.query, wanted.dimensions, wanted.normalize, wanted.truncate) == (None, 1, True, True)
    server.send("POST", "/api/embeddings", {"prompt": "a"})
    assert not server.model.embedded[-1].normalize
    server.send("POST", "/api/embed", {"input": "a", "truncate": False})
    assert not server.model.embedded[-1].truncate


@pytest.mark.push
def test_a_real_server_embeds_while_it_answers(real: Served) -> None:
    one = real.post("/v1/embeddings", input="a text")["data"][0]["embedding"]
    many = real.post("/v1/embeddings", input=["another"] * 40 + ["a text"])
    assert len(one) == HIDDEN_SIZE
    assert many["data"][-1]["embedding"] == one
    assert many["usage"]["prompt_tokens"] == 41 + 40 * len("another") + len("a text")
    assert real.post("/v1/completions", prompt="a", max_tokens=3)["choices"][0]["text"]
    end = time.monotonic() + 30
    while prompt_tokens(real) < many["usage"]["prompt_tokens"]:  # the next heartbeat has the count
        assert time.monotonic() < end
        time.sleep(0.05)


def prompt_tokens(server: Served) -> float:
    lines = server.call("GET", "/metrics")[2].decode().splitlines()
    return float(next(line for line in lines if line.startswith("llmrun_prompt_tokens_total{")).split()[-1])


@pytest.mark.push
def test_a_real_server_refuses_what_the_model_cannot_do(real: Served) -> None:
    status, _, body = real.call("POST", "/v1/embeddings", {"input": ["a", "x" * 100_000]})
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "input[1] does not fit in the context" in error["message"]
    status, _, body = real.call("POST", "/v1/rerank", {"query": "q", "documents": ["a"]})
    assert (status, "cannot rank documents" in json.loads(body)["error"]["message"]) == (400, True)
    status, _, _ = real.call("POST", "/v1/embeddings", {"input": "a", "dimensions": HIDDEN_SIZE + 1})
    assert status == 400


@pytest.mark.night
@pytest.mark.parametrize("backend", ["cpu", "llama"])
def test_a_real_reranker_ranks_and_generates_nothing(tmp_path: Path, backend: str) -> None:
    model = tiny_encoder(tmp_path, TINY_RERANKERS["bert"])
    with served(str(model), "--backend", backend) as server:
        body = {"query": "the", "documents": ["in the on", "re he", "the the the"]}
        results = server.post("/v1/rerank", **body)["results"]
        scores = [each["relevance_score"] for each in results]
        assert scores == sorted(scores, reverse=True)
        assert {each["index"] for each in results} == {0, 1, 2}
        alone = server.post("/v1/rerank", query="the", documents=[body["documents"][results[0]["index"]]])
        assert alone["results"][0]["relevance_score"] == scores[0]
        for path, asked in (("/v1/embeddings", {"input": "a"}), ("/v1/completions", {"prompt": "a"})):
            status, _, answer = server.call("POST", path, asked)
            assert (status, "embeddings" in json.loads(answer)["error"]["message"]) == (400, True)
