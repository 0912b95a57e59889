"""Tests that the tool calls of saved conversations are shown on safe lines and can be found."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given

from llmrun.cli.chatting.archive import answer_rows, matching_lines, round_rows
from llmrun.cli.chatting.conversation import Conversation, new_conversation
from llmrun.cli.chatting.events import (
    AnswerBegan,
    AnswerWent,
    Event,
    QuestionAsked,
    ToolAnswered,
    ToolCalled,
)
from llmrun.cli.chatting.saying import ConversationRecord
from llmrun.cli.chatting.store import Store
from tests.support.cli.chats import environment, session
from tests.support.cli.commands import llmrun
from tests.support.cli.conversations import folded, histories

HOSTILE = "\x1b[2J\u202e\u200b"
EVENTS: tuple[Event, ...] = (
    QuestionAsked("Why?", ""),
    AnswerBegan(1),
    AnswerWent("Let me see."),
    ToolCalled("x", f"echo{HOSTILE}", f'{{"text": "{HOSTILE}blue"}}'),
    ToolAnswered("x", f"\n{HOSTILE}first\nsecond sky"),
    AnswerBegan(2),
    AnswerWent("Done."),
)
ROWS = [
    "Let me see.",
    'tool echo\\u001b[2J\\u202e\\u200b {"text": "\\u001b[2J\\u202e\\u200bblue"}',
    "result: \\u001b[2J\\u202e\\u200bfirst second sky (23 characters)",
    "Done.",
]


def conversation() -> Conversation:
    found = new_conversation("m")
    for event in EVENTS:
        found.apply(event)
    return found


def test_calls_stand_between_the_texts() -> None:
    assert list(answer_rows(conversation().exchanges[0])) == ROWS


@given(histories())
def test_every_row_of_a_call_is_printable(history: list[Event]) -> None:
    for exchange in folded(history).exchanges:
        for one in exchange.rounds:
            assert all(row.isprintable() and len(row) < 400 for row in round_rows(one))


def test_calls_and_results_are_found() -> None:
    assert ["blue" in line.text for line in matching_lines(conversation(), ["BLUE"])] == [True]
    assert [line.text for line in matching_lines(conversation(), ["sky"])] == ["second sky"]
    assert matching_lines(conversation(), ["see", "done"]) == []


@pytest.fixture
def record(tmp_path: Path) -> ConversationRecord:
    found = ConversationRecord(Store(tmp_path / "conversations"), new_conversation("scripted"))
    for event in EVENTS:
        found.add(event)
    return found


def test_the_chat_shows_them(tmp_path: Path, record: ConversationRecord, capsys: pytest.CaptureFixture[str]) -> None:
    with session(tmp_path, record=record) as found:
        found.run("/show conversation")
    assert capsys.readouterr().err.splitlines()[:5] == ["> Why?", *ROWS]


def test_the_command_shows_them(tmp_path: Path, record: ConversationRecord) -> None:
    record.close()
    done = llmrun("conversations", "show", "why", env=environment(tmp_path))
    assert done.stdout.decode().splitlines()[-5:] == ["> Why?", *ROWS]
    assert done.returncode == 0
