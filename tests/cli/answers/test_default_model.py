"""Tests of the default-model note, which a person who named no model sees once."""

from __future__ import annotations

import inspect
import io
import sys
from pathlib import Path

import pytest

from llmrun.cli.answers import answering
from llmrun.cli.answers.answering import tell_of_default_model
from llmrun.cli.arguments.options import AnswerFlags
from llmrun.cli.commands import chat
from llmrun.cli.console.output import out
from llmrun.options.settings import Settings, load_settings

Capture = pytest.CaptureFixture[str]

LINE = "note: smollm2:135m is a toy model for trying out llmrun; `llmrun fit` recommends models for this machine\n"


@pytest.fixture(autouse=True)
def person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a first-time user at a terminal."""
    monkeypatch.setattr(answering, "is_terminal", lambda stream: True)
    monkeypatch.setenv("LLMRUN_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.delenv("LLMRUN_MODEL", raising=False)
    (tmp_path / "config.toml").touch()


def told(capsys: Capture) -> str:
    tell_of_default_model(load_settings())
    return capsys.readouterr().err


def test_it_is_said_once(capsys: Capture) -> None:
    assert told(capsys) == LINE
    assert told(capsys) == ""


def test_it_is_not_said_to_those_who_chose_the_model(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.toml").write_text('model = "smollm2:135m"\n')
    assert told(capsys) == ""
    (tmp_path / "config.toml").write_text("")
    monkeypatch.setenv("LLMRUN_MODEL", "smollm2:135m")
    assert told(capsys) == ""
    monkeypatch.setenv("LLMRUN_MODEL", "qwen3:4b")
    assert told(capsys) == ""
    monkeypatch.delenv("LLMRUN_MODEL")
    assert told(capsys) == LINE


def test_it_is_said_neither_in_a_pipe_nor_in_quiet_mode(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as quiet:
        quiet.setattr(out, "quiet", True)
        assert told(capsys) == ""
    with monkeypatch.context() as pipe:
        pipe.setattr(answering, "is_terminal", lambda stream: False)
        assert told(capsys) == ""
    assert told(capsys) == LINE


def test_a_stand_in_for_a_model_is_no_toy_of_ours(capsys: Capture) -> None:
    tell_of_default_model(Settings(backend="scripted"))
    assert capsys.readouterr().err == ""


def chats(monkeypatch: pytest.MonkeyPatch, continued: str | None, model: str | None = None) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    command = inspect.unwrap(chat.command)
    assert command(None, continued, flags=AnswerFlags(backend="scripted", model=model)) == 0


def test_a_continued_chat_says_nothing_about_the_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[str] = []
    monkeypatch.setattr(answering, "tell_of_default_model", lambda settings: models.append(settings.model))
    chats(monkeypatch, None, "other")
    chats(monkeypatch, "")
    chats(monkeypatch, "hello")
    assert models == []
    chats(monkeypatch, None)
    assert models == ["smollm2:135m"]


def test_a_continued_chat_says_nothing_about_presets_of_new_chats(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models.toml").write_text('[presets.shout]\nmodel = "a"\nprompt = "Shout: $input"\n')
    (tmp_path / "config.toml").write_text('model = "shout"\n')
    chats(monkeypatch, None, "other")
    capsys.readouterr()
    chats(monkeypatch, "")
    assert "shout" not in capsys.readouterr().err
    chats(monkeypatch, None)
    assert "preset shout: a chat uses" in capsys.readouterr().err


def test_where_nothing_can_be_remembered_nothing_is_said(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "data").write_text("a file where a folder should be")
    assert told(capsys) == ""
