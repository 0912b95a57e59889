"""Tests that the tokens of a conversation are counted again only when it has changed."""

from __future__ import annotations

from typing import Any, cast

from llmrun.cli.chatting.context import ContextUsed, Prompting
from llmrun.cli.chatting.conversation import new_conversation
from llmrun.cli.chatting.events import AnswerBegan, Event, ModelChanged, QuestionAsked, ToolAnswered, ToolCalled
from llmrun.engine.base import Answering


class CountingEngine:
    """Counts how often it is asked, and returns that count as the number of tokens."""

    def __init__(self) -> None:
        self.asked = 0

    def prompt_tokens(self, request: Any) -> int:
        self.asked += 1
        return self.asked


def test_every_change_of_the_conversation_is_counted() -> None:
    used, engine = ContextUsed(Prompting({})), cast("Answering", CountingEngine())
    conversation = new_conversation("one")
    changes: tuple[Event, ...] = (
        AnswerBegan(1),
        ToolCalled("x", "echo", "{}"),
        ToolCalled("y", "echo", "{}"),
        ToolAnswered("x", "hi"),
        ModelChanged("two"),
        ModelChanged("one"),
    )
    conversation.apply(QuestionAsked("why?", ""))
    assert used.tokens(engine, conversation) == 1
    for count, change in enumerate(changes, 2):
        conversation.apply(change)
        assert used.tokens(engine, conversation) == used.tokens(engine, conversation) == count
