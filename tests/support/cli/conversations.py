"""Strategies for random events and complete conversations."""

from __future__ import annotations

from hypothesis import strategies as st

from llmrun.base.types import FinishReason
from llmrun.cli.chatting.conversation import Conversation, Misplaced
from llmrun.cli.chatting.events import (
    FAILED,
    FORMAT,
    AnswerBegan,
    Answered,
    AnswerEnded,
    AnswerWent,
    Began,
    Cleared,
    Event,
    ImageShown,
    ModelChanged,
    PreferenceSet,
    QuestionAsked,
    SystemSet,
    Thought,
    ToolAnswered,
    ToolCalled,
    Undone,
    WasThinking,
)

texts = st.text(max_size=30) | st.text("\n\r\t\x00\x1b\u2028\x85\\\"'/ é🙂", max_size=8)
counts = st.integers(0, 2**53)
seconds = st.floats(0, 1e9)

_preferences = st.one_of(
    st.builds(PreferenceSet, st.just("temperature"), st.none() | st.floats(0, 100)),
    st.builds(PreferenceSet, st.just("top_k"), st.none() | st.integers(0, 10**6)),
    st.builds(PreferenceSet, st.just("repeat_last_n"), st.none() | st.integers(-1, 10**6)),
    st.builds(PreferenceSet, st.just("seed"), st.none() | st.integers(0, 2**64 - 1)),
    st.builds(PreferenceSet, st.just("max_tokens"), st.none() | st.integers(1, 10**6)),
    st.builds(PreferenceSet, st.just("think"), st.none() | st.booleans()),
    st.builds(PreferenceSet, st.just("stop"), st.none() | st.lists(st.text(min_size=1), min_size=1, max_size=3)),
)


@st.composite
def _questions(draw: st.DrawFn) -> QuestionAsked:
    text = draw(texts)
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
    images = tuple(ImageShown(at, f"{at:064x}", draw(texts), "PNG", draw(counts), draw(counts)) for at in places)
    return QuestionAsked(text, draw(texts), images)


_call_ids = st.sampled_from(["", "call_0", "call_1"])
_began = st.builds(Began, st.just(FORMAT), texts, texts, texts, texts)
_later = st.one_of(
    st.builds(ModelChanged, texts),
    st.builds(SystemSet, st.none() | texts),
    _preferences,
    _questions(),
    st.builds(AnswerBegan, st.integers(0, 2**64 - 1)),
    st.builds(Thought, texts),
    st.builds(AnswerWent, texts),
    st.builds(
        AnswerEnded,
        st.sampled_from([*map(str, FinishReason), FAILED]),
        counts,
        counts,
        counts,
        counts,
        seconds,
        seconds,
    ),
    st.builds(
        Answered,
        texts,
        st.none() | texts,
        st.integers(0, 2**64 - 1),
        st.sampled_from([None, *map(str, FinishReason), FAILED]),
        counts,
        counts,
        counts,
        counts,
        seconds,
        seconds,
    ),
    st.builds(ToolCalled, _call_ids, texts, texts | st.just('{"a": 1}')),
    st.builds(ToolAnswered, _call_ids, texts),
    st.just(WasThinking()),
    st.just(Undone()),
    st.just(Cleared()),
)


def events() -> st.SearchStrategy[Event]:
    return _began | _later


@st.composite
def histories(draw: st.DrawFn, most: int = 30) -> list[Event]:
    """Draw a valid sequence of events, starting with the beginning of a conversation."""
    began = draw(_began)
    conversation = Conversation(began, began.model)
    history: list[Event] = [began]
    for event in draw(st.lists(_later, max_size=most)):
        try:
            conversation.apply(event)
        except Misplaced:
            continue
        history.append(event)
    return history


def folded(history: list[Event]) -> Conversation:
    began, *later = history
    assert isinstance(began, Began)
    conversation = Conversation(began, began.model)
    for event in later:
        conversation.apply(event)
    return conversation


def told(conversation: Conversation) -> list[Event]:
    """Return the conversation's history, in which the pieces of each answer are joined."""
    return list(conversation.history())
