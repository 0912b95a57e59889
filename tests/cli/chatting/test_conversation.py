"""Tests that a conversation is the result of its events."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from hypothesis import given

from llmrun.cli.chatting.conversation import TITLE_CHARACTERS, Conversation, Misplaced, new_conversation
from llmrun.cli.chatting.events import (
    AnswerBegan,
    AnswerEnded,
    AnswerWent,
    Cleared,
    Event,
    ModelChanged,
    PreferenceSet,
    QuestionAsked,
    SystemSet,
    Thought,
    ToolAnswered,
    ToolCalled,
    Undone,
)
from tests.support.cli.conversations import events, folded, histories

ENDED = AnswerEnded("stop", 12, 8, 0, 4, 0.1, 0.2)


def after(*later: Event) -> Conversation:
    conversation = new_conversation("m")
    for event in later:
        conversation.apply(event)
    return conversation


def test_the_engine_is_given_everything_but_the_answer_it_is_to_write() -> None:
    conversation = after(
        SystemSet("brief"), QuestionAsked("a", ""), AnswerBegan(1), AnswerWent("A"), AnswerWent("!"), ENDED
    )
    first = [{"role": "system", "content": "brief"}, {"role": "user", "content": "a"}]
    assert conversation.messages() == first
    conversation.apply(QuestionAsked("b", ""))
    assert conversation.messages() == [
        *first,
        {"role": "assistant", "content": "A!"},
        {"role": "user", "content": "b"},
    ]


def test_an_empty_system_prompt_is_one_and_none_is_none() -> None:
    assert after(SystemSet(""), QuestionAsked("a", "")).messages()[0] == {"role": "system", "content": ""}
    assert after(SystemSet("x"), SystemSet(None), QuestionAsked("a", "")).messages() == [
        {"role": "user", "content": "a"}
    ]


def test_a_second_answer_takes_the_place_of_the_first() -> None:
    conversation = after(
        QuestionAsked("a", ""), AnswerBegan(1), AnswerWent("A"), ENDED, AnswerBegan(2), AnswerWent("B")
    )
    (exchange,) = conversation.exchanges
    assert (exchange.answer, exchange.ended) == ("B", None)


def test_thinking_is_kept_apart_and_belongs_to_its_answer() -> None:
    conversation = after(QuestionAsked("a", ""), AnswerBegan(1), Thought("hm"), Thought("!"), AnswerWent("A"), ENDED)
    conversation.apply(QuestionAsked("b", ""))
    assert conversation.messages()[1] == {"role": "assistant", "content": "A", "reasoning_content": "hm!"}
    again = after(QuestionAsked("a", ""), AnswerBegan(1), Thought("hm"), ENDED, AnswerBegan(2), AnswerWent("B"))
    assert (again.exchanges[0].thinking, again.exchanges[0].answer) == ("", "B")


def test_undo_takes_back_the_last_question_and_its_answer() -> None:
    conversation = after(
        QuestionAsked("a", ""), AnswerBegan(1), ENDED, QuestionAsked("b", ""), AnswerBegan(2), AnswerWent("B")
    )
    conversation.apply(Undone())
    assert [one.question for one in conversation.exchanges] == ["a"]
    assert conversation.context_used == 12


def test_clear_keeps_the_system_prompt_and_the_settings() -> None:
    conversation = after(SystemSet("brief"), PreferenceSet("top_k", 3), QuestionAsked("a", ""), Cleared())
    assert conversation.exchanges == []
    assert conversation.context_used == 0
    assert (conversation.system, conversation.preferences) == ("brief", {"top_k": 3})


def test_a_preference_set_to_nothing_is_gone() -> None:
    assert after(PreferenceSet("top_k", 3), PreferenceSet("top_k", None)).preferences == {}


def test_a_title_is_the_first_question_on_one_short_line() -> None:
    assert after(QuestionAsked(" why\n is  it?\n", "")).title == "why is it?"
    assert len(after(QuestionAsked("x" * 500, "")).title) == TITLE_CHARACTERS


@pytest.mark.parametrize(
    "before_and_event",
    [
        (Undone(),),
        (AnswerBegan(1),),
        (AnswerWent("x"),),
        (QuestionAsked("a", ""), AnswerWent("x")),
        (QuestionAsked("a", ""), Thought("x")),
        (QuestionAsked("a", ""), ENDED),
        (QuestionAsked("a", ""), QuestionAsked("b", "")),
        (QuestionAsked("a", ""), AnswerBegan(1), ENDED, ENDED),
        (QuestionAsked("a", ""), AnswerBegan(1), ENDED, AnswerWent("late")),
        (new_conversation("m").began,),
        (ToolCalled("x", "echo", ""),),
        (QuestionAsked("a", ""), ToolCalled("x", "echo", "")),
        (QuestionAsked("a", ""), AnswerBegan(1), ToolAnswered("x", "one")),
        (
            QuestionAsked("a", ""),
            AnswerBegan(1),
            ToolCalled("x", "echo", ""),
            ToolAnswered("x", "one"),
            ToolCalled("y", "echo", ""),
        ),
        (QuestionAsked("a", ""), AnswerBegan(1), ToolCalled("x", "echo", ""), ToolAnswered("y", "one")),
    ],
)
def test_an_event_that_cannot_come_here_is_refused(before_and_event: tuple[Event, ...]) -> None:
    *before, event = before_and_event
    conversation = after(*before)
    with pytest.raises(Misplaced):
        conversation.apply(event)


@given(histories(), events())
def test_a_refused_event_changes_nothing(history: list[Event], event: Event) -> None:
    conversation = folded(history)
    before = copy.deepcopy(conversation)
    try:
        conversation.apply(event)
    except Misplaced:
        assert conversation == before


@given(histories())
def test_the_short_history_makes_the_same_conversation(history: list[Event]) -> None:
    conversation = folded(history)
    again = folded(list(conversation.history()))
    assert list(again.history()) == list(conversation.history())
    assert again.messages() == conversation.messages()
    assert (again.model, again.system, again.preferences) == (
        conversation.model,
        conversation.system,
        conversation.preferences,
    )
    assert (again.context_used, again.title, again.unanswered) == (
        conversation.context_used,
        conversation.title,
        conversation.unanswered,
    )


CALLS = (
    QuestionAsked("a", ""),
    AnswerBegan(1),
    Thought("hm"),
    AnswerWent("Let me see."),
    replace(ENDED, reason="tool_calls"),
    ToolCalled("x", "echo", '{"text": "1"}'),
    ToolCalled("y", "echo", "{}"),
)
RESULTS = (ToolAnswered("x", "one"), ToolAnswered("y", "two"))
TOLD: list[dict[str, object]] = [
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "x", "type": "function", "function": {"name": "echo", "arguments": '{"text": "1"}'}},
            {"id": "y", "type": "function", "function": {"name": "echo", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "x", "name": "echo", "content": "one"},
    {"role": "tool", "tool_call_id": "y", "name": "echo", "content": "two"},
]


def test_calls_and_results_precede_the_answer() -> None:
    conversation = after(*CALLS, *RESULTS)
    assert conversation.messages() == TOLD
    conversation.apply(AnswerBegan(2))
    conversation.apply(AnswerWent("A"))
    assert conversation.messages() == TOLD
    assert conversation.all_messages() == [*TOLD, {"role": "assistant", "content": "A"}]


def test_another_answer_keeps_the_results() -> None:
    conversation = after(*CALLS, *RESULTS, AnswerBegan(2), AnswerWent("A"), ENDED, AnswerBegan(3), AnswerWent("B"))
    assert conversation.all_messages() == [*TOLD, {"role": "assistant", "content": "B"}]


def test_undo_removes_the_calls_too() -> None:
    assert after(*CALLS, *RESULTS, Undone()).exchanges == []


def test_a_call_without_a_result_was_interrupted() -> None:
    conversation = after(*CALLS, RESULTS[0])
    assert conversation.messages()[-2:] == [
        TOLD[-2],
        {**TOLD[-1], "content": "The call was interrupted, and its result is unknown."},
    ]
    assert conversation.is_stopped_at_calls
    assert folded(list(conversation.history())) == conversation


def test_an_answer_whose_calls_were_not_saved_was_stopped() -> None:
    began, ended = AnswerBegan(1), replace(ENDED, reason="tool_calls")
    assert after(CALLS[0], began, ended).is_stopped_at_calls
    assert not after(CALLS[0], began, ENDED).is_stopped_at_calls
    assert not after(CALLS[0], began, ended, QuestionAsked("b", "")).is_stopped_at_calls
    assert folded(list(after(CALLS[0], began, ended).history())).is_stopped_at_calls


def test_a_question_may_follow_stopped_calls() -> None:
    conversation = after(*CALLS, *RESULTS)
    assert conversation.unanswered is None
    conversation.apply(QuestionAsked("b", ""))
    assert conversation.messages() == [
        *TOLD,
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "b"},
    ]
    assert conversation.unanswered == "b"
    assert not conversation.is_stopped_at_calls


@pytest.mark.parametrize("arguments", ["", "{", "[]", "7", '{"a": NaN}', '{"a": "\\ud800"}', "[" * 5000])
def test_arguments_that_are_no_object_are_left_out(arguments: str) -> None:
    conversation = after(*CALLS[:5], ToolCalled("x", "echo", arguments))
    (call,) = conversation.messages()[1]["tool_calls"]
    assert call["function"]["arguments"] in ("{}", "")


def test_a_conversation_is_counted_by_its_last_answer_alone() -> None:
    answered = (QuestionAsked("a", ""), AnswerBegan(1), AnswerWent("A"))
    assert after().is_counted
    assert not after(*answered).is_counted
    assert after(*answered, ENDED).is_counted
    assert not after(*answered, replace(ENDED, prompt_tokens=0)).is_counted
    assert after(*answered, ENDED, ModelChanged("m")).is_counted
    other = after(*answered, ENDED, ModelChanged("other"))
    assert not other.is_counted
    assert not folded(list(other.history())).is_counted
    assert after(*answered, ENDED, ModelChanged("other"), AnswerBegan(2), ENDED).is_counted


@pytest.mark.parametrize(
    ("system", "old", "new", "expected"),
    [
        (None, None, "pirate", [SystemSet("pirate")]),
        ("pirate", "pirate", None, [SystemSet(None)]),
        ("pirate", "pirate", "pirate", []),
        ("mine", "pirate", "poet", []),
        ("", None, "pirate", []),
    ],
)
def test_another_model_brings_its_system_prompt_unless_the_user_set_one(
    system: str | None, old: str | None, new: str | None, expected: list[SystemSet]
) -> None:
    conversation = new_conversation("m")
    conversation.system = system
    assert [*conversation.switched("other", old, new)] == [ModelChanged("other"), *expected]
