"""Tests of the list of conversations."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmrun.cli.chatting.archive import conversation_table, listed_conversations, model_name
from llmrun.cli.chatting.conversation import new_conversation
from llmrun.cli.chatting.events import QuestionAsked, Undone
from llmrun.cli.chatting.saying import ConversationRecord
from llmrun.cli.chatting.store import Store
from llmrun.cli.console import output


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "conversations")


def begun(store: Store, question: str, changed: float) -> None:
    record = ConversationRecord(store, new_conversation("/models/fox.gguf"))
    record.add(QuestionAsked(question, ""))
    assert record.path
    os.utime(record.path, (changed, changed))
    record.close()


def test_the_newest_come_first_and_empty_ones_are_left_out(store: Store) -> None:
    begun(store, "old one", 100)
    begun(store, "new one", 200)
    empty = ConversationRecord(store, new_conversation("m"))
    empty.add(QuestionAsked("gone", ""))
    empty.add(Undone())
    assert [one.name for one in listed_conversations(store)] == ["new-one", "old-one"]
    empty.close()


def test_a_table_shows_no_control_sequence(store: Store) -> None:
    begun(store, "\x1b[31mred\n\x9b", 0)
    lines = conversation_table(listed_conversations(store), now=7200)
    assert lines[1].split() == ["31mred", "2", "hours", "ago", "fox", "1", "␛[31mred", "<9B>"]


def test_a_narrow_terminal_loses_columns_and_keeps_the_names(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(store, "a question with rather many words in it", 0)
    monkeypatch.setattr(output, "is_terminal", lambda stream: True)
    monkeypatch.setattr(output, "columns", lambda: 70)
    lines = conversation_table(listed_conversations(store), now=60)
    assert lines[0].split() == ["NAME", "WHEN", "TURNS"]
    assert lines[1].startswith("a-question-with-rather-many-words")


@pytest.mark.parametrize(
    ("model", "name"),
    [("qwen3:4b", "qwen3:4b"), ("/a/b.gguf", "b"), ("http://h/v1#m", "http://h/v1#m"), ("", "")],
)
def test_the_name_of_a_model(model: str, name: str) -> None:
    assert model_name(new_conversation(model)) == name
