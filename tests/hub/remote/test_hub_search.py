"""Tests of searching the Hub, with the real client and a local Hub."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from llmrun.base.errors import NetworkError
from llmrun.hub.remote import network_errors
from llmrun.hub.remote.huggingface import HubModel, search_hub
from llmrun.hub.remote.network_errors import Unreachable
from tests.support.hub.fake_hub import FakeHub, Fault, fake_hub
from tests.support.hub.hub_client import at_hub, settled

FILES = {"m-Q8_0.gguf": b"GGUF"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as running:
        at_hub(monkeypatch, running.url)
        for name in ("Qwen/Qwen3-4B-GGUF", "o/mistral", "unsloth/Qwen3-8B-GGUF"):
            running.add(name, FILES)
        yield running


def saying(body: bytes) -> Fault:
    return Fault(on="api", alter=lambda _: body, headers={"Content-Length": str(len(body))})


def test_repositories_have_names_to_paste(hub: FakeHub) -> None:
    first, second = search_hub("qwen3", 20)
    assert first == HubModel("Qwen/Qwen3-4B-GGUF", 1000, 0, "mit", False)
    assert (first.name, second.name) == ("hf:Qwen/Qwen3-4B-GGUF", "hf:unsloth/Qwen3-8B-GGUF")
    assert [model.repository for model in search_hub("", 2)] == ["Qwen/Qwen3-4B-GGUF", "o/mistral"]
    assert search_hub("zzz", 2) == []


def test_the_token_is_sent(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("o/private-llama", FILES, token="hf_right")
    assert search_hub("llama", 5) == []
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert [model.name for model in search_hub("llama", 5)] == ["hf:o/private-llama"]
    assert settled(hub)[-1].authorization == "Bearer hf_right"


def test_a_hub_that_does_not_answer_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    at_hub(monkeypatch, "http://127.0.0.1:1")
    with pytest.raises(Unreachable, match=r"^search --hub: the Hub does not respond: unreachable \(") as caught:
        search_hub("x", 1)
    assert caught.value.hint


def test_a_hub_that_hangs_is_given_up(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_errors, "ANSWER_SECONDS", 0.1)
    hub.latency = 2
    with pytest.raises(Unreachable, match=r"does not respond: (no answer within 0\.1 s|timed out)"):
        search_hub("x", 1)


def test_a_hub_that_refuses_or_answers_nonsense_is_a_network_error(hub: FakeHub) -> None:
    hub.faults.append(Fault(on="api", status=403))
    with pytest.raises(NetworkError, match=r"^search --hub: access denied \(HTTP 403\)"):
        search_hub("qwen", 5)
    hub.faults.append(saying(b"<html>"))
    with pytest.raises(NetworkError, match=r"^search --hub: the response does not come from a Hugging Face Hub"):
        search_hub("qwen", 5)


def test_what_a_server_says_is_checked(hub: FakeHub) -> None:
    said = [
        {"id": "../../etc"},
        {"id": "noowner"},
        {"id": "o/\x1b[31m"},
        {"id": 1},
        "o/text",
        {"id": "o/n", "downloads": -1, "likes": "many", "tags": [1, "license:" + "x" * 99]},
    ]
    hub.faults.append(saying(json.dumps(said).encode()))
    assert search_hub("", 9) == [HubModel("o/n", 0, 0, "x" * 60, False)]
    hub.faults.append(saying(b"{}"))
    with pytest.raises(NetworkError, match="does not come from a Hugging Face Hub"):
        search_hub("", 9)
