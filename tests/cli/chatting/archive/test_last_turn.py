"""Tests of the last turn, which is shown when a chat continues a conversation."""

from __future__ import annotations

import pytest

from llmrun.cli.chatting import archive as module
from llmrun.cli.chatting.archive import last_turn
from llmrun.cli.chatting.conversation import Conversation, new_conversation
from llmrun.cli.chatting.events import AnswerBegan, AnswerWent, QuestionAsked, ToolAnswered, ToolCalled


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "columns", lambda: 40)


def after(*turns: tuple[str, str]) -> Conversation:
    conversation = new_conversation("m")
    for question, answer in turns:
        conversation.apply(QuestionAsked(question, ""))
        if answer:
            conversation.apply(AnswerBegan(1))
            conversation.apply(AnswerWent(answer))
    return conversation


def test_a_short_turn_is_shown_whole() -> None:
    assert last_turn(after(("one\nmore", "A\n\nB"))) == ["> one", "  more", "A", "B"]


def test_only_the_last_answered_turn_is_shown() -> None:
    conversation = after(("one", "A"), ("two", "B"), ("three", ""))
    assert last_turn(conversation) == ["> two", "B", "/show conversation shows all of it"]


def test_a_long_turn_is_cut_to_ten_rows() -> None:
    rows = last_turn(after(("why " * 50, "because " * 200)))
    assert len(rows) == 10
    assert max(map(len, rows)) <= 40
    assert [number for number, row in enumerate(rows) if row == "…"] == [2, 8]
    assert rows[-1] == "/show conversation shows all of it"


def test_there_is_nothing_to_show_before_the_first_answer() -> None:
    assert last_turn(after()) == []
    assert last_turn(after(("one", ""))) == []


def test_tool_calls_are_counted() -> None:
    conversation = after(("why?", "let me see"))
    for event in (ToolCalled("x", "echo", "{}"), ToolAnswered("x", "one"), AnswerBegan(2), AnswerWent("A")):
        conversation.apply(event)
    assert last_turn(conversation) == ["> why?", "(1 tool call)", "A", "/show conversation shows all of it"]
