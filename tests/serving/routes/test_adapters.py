"""Tests of LoRA adapters over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serving.serve_process import Served, served

pytestmark = pytest.mark.push

NOISE = '{"answers": [["a cue that no prompt has", ""]]}'  # so that the answers are noise
BODY = {"prompt": "once upon a time there was a", "max_tokens": 12, "temperature": 1, "seed": 3}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("adapters")
    script = folder / "noise.json"
    script.write_text(NOISE)
    for name in ("one", "two"):
        (folder / f"{name}.gguf").touch()
    flags = ["--lora", f"first={folder / 'one.gguf'}:0", "--lora", f"{folder / 'two.gguf'}:0.5"]
    with served(str(script), "--backend", "scripted", *flags) as running:
        yield running


def text_of(server: Served, **fields: object) -> str:
    text: str = server.post("/v1/completions", **BODY, **fields)["choices"][0]["text"]
    return text


def test_requests_choose_their_adapters(server: Served) -> None:
    """The answers do not depend on the order of the requests, although they share the cache."""
    first = [{"id": 0, "scale": 1.0}]
    asked: list[dict[str, object]] = [{"lora": first}, {"lora": []}, {}, {"lora": first}, {"lora": []}]
    answers = [text_of(server, **fields) for fields in asked]
    assert answers[0] == answers[3]
    assert answers[1] == answers[4]
    assert len(set(answers)) == 3


def test_the_name_of_an_adapter_is_a_model(server: Served) -> None:
    """The base model uses the scales of --lora, which is 0 for the first adapter."""
    models = json.loads(server.call("GET", "/v1/models")[2])["data"]
    base, first, two = (model["id"] for model in models)
    assert [model.get("parent") for model in models] == [None, base, base]
    assert (first, two) == ("first", "two")
    assert text_of(server, model="first") == text_of(server, lora=[{"id": 0, "scale": 1.0}])
    assert text_of(server, model="two") == text_of(server, model=base) == text_of(server)
    assert text_of(server, model="two", lora=[]) == text_of(server, lora=[])
    assert text_of(server, lora=[]) not in (text_of(server, model="first"), text_of(server, model="two"))


@pytest.mark.night
def test_presets_choose_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapters of all presets of a model are loaded, and only the requests of a preset use its own."""
    script = tmp_path / "noise.json"
    script.write_text(NOISE)
    for name in ("one", "two"):
        (tmp_path / f"{name}.gguf").touch()
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "models.toml").write_text(
        f'[presets.a]\nmodel = "{script}"\nlora = "one.gguf"\n'
        f'[presets.b]\nmodel = "{script}"\nlora = ["one.gguf", "two.gguf:0.5"]\n'
    )
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    with served(str(script), "a", "b", "--backend", "scripted") as server:
        answers = {name: text_of(server, model=name) for name in ("a", "b", "noise")}
        assert json.loads(server.call("GET", "/lora-adapters")[2]) == [
            {"id": 0, "name": "one", "scale": 0.0},
            {"id": 1, "name": "two", "scale": 0.0},
        ]
        assert answers["a"] == text_of(server, lora=[{"name": "one", "scale": 1.0}])
        assert answers["b"] == text_of(server, lora=[{"name": "one", "scale": 1.0}, {"name": "two", "scale": 0.5}])
        assert answers["noise"] == text_of(server, lora=[])
    assert len(set(answers.values())) == 3


def test_the_server_lists_its_adapters(server: Served) -> None:
    status, _, body = server.call("GET", "/lora-adapters")
    assert status == 200
    assert json.loads(body) == [
        {"id": 0, "name": "first", "scale": 0.0},
        {"id": 1, "name": "two", "scale": 0.5},
    ]
