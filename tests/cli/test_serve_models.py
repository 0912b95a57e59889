"""Tests of `llmrun serve` with several models, as a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli.commands import llmrun
from tests.support.serving.serve_process import served

pytestmark = pytest.mark.push

CHAT = "/v1/chat/completions"


def test_requests_choose_among_several_models() -> None:
    with served("one", "two", "--backend", "scripted", "--keep-alive", "-1") as server:
        asked = {"messages": [{"role": "user", "content": "Hello"}]}
        assert [server.post(CHAT, model=name, **asked)["model"] for name in ("two", "one", "")] == ["two", "one", "one"]
        _, _, listed = server.call("GET", "/v1/models")
        assert [listed.count(name) for name in (b'"id":"one"', b'"id":"two"', b"max_model_len")] == [1, 1, 2]
        for name in ("three", "./one", "hf:owner/name", "https://example.com/x.gguf"):
            status, _, body = server.call("POST", CHAT, {"model": name, **asked})
            assert (status, b"this server has 'one', 'two'" in body) == (404, True)


@pytest.mark.night
def test_idle_models_are_unloaded_and_loaded_again() -> None:
    with served("one", "two", "--backend", "scripted", "--keep-alive", "50ms") as server:
        assert server.chat("Hello", model="two")["model"] == "two"
        server.wait_for(lambda: b'model="two"' not in server.call("GET", "/metrics")[2])
        assert server.call("GET", "/health")[0] == 200
        assert server.chat("Hello", model="two")["model"] == "two"


def test_wrong_values_are_refused_in_one_line() -> None:
    for flags, words in (
        (["--keep-alive", "5x"], "error: --keep-alive: '5x' is not a duration\nhint: examples: 30s, 5m, 1h, or -1 for"),
        (["two", "--chat-template", "-"], "error: --chat-template: cannot be used with several models"),
        (["two", "-m", "three"], "error: model: given twice"),
        (["http://127.0.0.1:1/v1"], "error: model: http://127.0.0.1:1/v1: already runs on a server"),
    ):
        done = llmrun("serve", "--backend", "scripted", "one", *flags)
        assert done.returncode == 2
        assert done.stderr.decode().startswith(words), done.stderr


@pytest.mark.night
def test_presets_are_served_beside_their_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models.toml").write_text('[presets.pirate]\nmodel = "one"\nsystem = "Say arr."\nmax_tokens = 5\n')
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "config.toml").write_text("")
    with served("pirate", "one", "--backend", "scripted") as server:
        pirate, plain = (server.chat("Hello", model=name) for name in ("Pirate", "one"))
        assert (pirate["model"], pirate["usage"]["completion_tokens"]) == ("pirate", 5)
        assert (plain["model"], plain["choices"][0]["message"]["content"]) == ("one", "You said: Hello")
        assert pirate["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
        assert server.call("GET", "/metrics")[2].count(b"llmrun_up{") == 1  # both share one engine
