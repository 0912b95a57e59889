"""Tests of when a chat saves the KV cache of its conversation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmrun.backends.scripted import ScriptedBackend
from llmrun.cli.chatting.context import ConversationState
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Request, TokenPrompt
from tests.support.engine.answers import answer_all


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine that, like llama.cpp, is saved only when a chat ends or continues another conversation."""
    backend = ScriptedBackend(context_size=4096)
    monkeypatch.setattr(backend.kv, "saves_blocks", False)
    with Engine(backend) as engine:
        yield engine


def answer_in(state: ConversationState, engine: Engine, conversation: Path, token: int) -> None:
    conversation.touch()
    state.use(engine, conversation)
    answer_all(engine, [Request(TokenPrompt([token] * 100), 2)])
    state.save(engine)


def states(folder: Path) -> list[str]:
    return sorted(path.name.partition(".")[0] for path in folder.glob("*.kv"))


def test_the_earlier_conversation_is_saved(tmp_path: Path, engine: Engine) -> None:
    state = ConversationState(tmp_path, 1 << 30)
    answer_in(state, engine, tmp_path / "a.jsonl", 65)
    assert states(tmp_path) == []
    answer_in(state, engine, tmp_path / "b.jsonl", 66)
    assert states(tmp_path) == ["a"]
    state.finish(engine)
    assert states(tmp_path) == ["a", "b"]


def test_the_state_of_an_earlier_version_is_used(tmp_path: Path, engine: Engine) -> None:
    answer_in(state := ConversationState(tmp_path, 1 << 30), engine, tmp_path / "a.jsonl", 65)
    state.finish(engine)
    [saved] = tmp_path.glob("*.kv")
    saved.rename(tmp_path / "a.kv")
    engine.forget()
    ConversationState(tmp_path, 1 << 30).use(engine, tmp_path / "a.jsonl")
    assert [*tmp_path.glob("*.kv")] == [saved]
    [answer] = answer_all(engine, [Request(TokenPrompt([65] * 100), 2)])
    assert answer.finished.timings.cached_tokens == 99


def test_nothing_is_saved_under_a_name_that_a_conversation_no_longer_has(tmp_path: Path, engine: Engine) -> None:
    state = ConversationState(tmp_path, 1 << 30)
    answer_in(state, engine, tmp_path / "a.jsonl", 65)
    (tmp_path / "a.jsonl").rename(tmp_path / "b.jsonl")
    answer_in(state, engine, tmp_path / "b.jsonl", 66)
    state.finish(engine)
    assert states(tmp_path) == ["b"]


def test_nothing_is_saved_for_a_removed_conversation(tmp_path: Path, engine: Engine) -> None:
    state = ConversationState(tmp_path, 1 << 30)
    answer_in(state, engine, tmp_path / "a.jsonl", 65)
    (tmp_path / "a.jsonl").unlink()
    state.finish(engine)
    assert states(tmp_path) == []
