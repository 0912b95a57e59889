"""Tests that tool calls are collected from the pieces in which they arrive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.cli.answers.answering import CollectedCalls
from llmrun.engine.requests import ToolCall, ToolCallDelta

deltas = st.builds(
    ToolCallDelta,
    st.integers(0, 3),
    st.sampled_from(["", "a", "b"]),
    st.sampled_from(["", "echo"]),
    st.text(max_size=3),
    st.sampled_from(["", "", "", "broken"]),
)


def collected(*pieces: ToolCallDelta) -> CollectedCalls:
    calls = CollectedCalls()
    for piece in pieces:
        calls.take([piece])
    return calls


def test_pieces_of_calls_are_joined_by_index() -> None:
    calls = collected(
        ToolCallDelta(0, "a", "echo", '{"te'),
        ToolCallDelta(1, "b", "time"),
        ToolCallDelta(0, arguments='xt": 1}'),
        ToolCallDelta(1, arguments="{}"),
    )
    assert calls.calls == [ToolCall("a", "echo", '{"text": 1}'), ToolCall("b", "time", "{}")]


def test_another_id_begins_another_call() -> None:
    calls = collected(
        ToolCallDelta(0, "a", "echo", '{"te'),
        ToolCallDelta(0, arguments='xt": 1}'),
        ToolCallDelta(0, "b", "echo", "{"),
        ToolCallDelta(0, arguments="}"),
        ToolCallDelta(1, "c", "time", "{}"),
        ToolCallDelta(0, "d", "last", "{}"),
    )
    assert calls.calls == [
        ToolCall("a", "echo", '{"text": 1}'),
        ToolCall("b", "echo", "{}"),
        ToolCall("c", "time", "{}"),
        ToolCall("d", "last", "{}"),
    ]


def test_repeated_ids_and_names_are_ignored() -> None:
    calls = collected(ToolCallDelta(0, "a", "echo", "{"), ToolCallDelta(0, "a", "echo", "}"))
    assert calls.calls == [ToolCall("a", "echo", "{}")]


def test_a_new_id_without_a_name_continues_the_call() -> None:
    calls = collected(ToolCallDelta(0, "a", "echo", "{"), ToolCallDelta(0, "b", arguments="}"))
    assert calls.calls == [ToolCall("a", "echo", "{}")]


def test_broken_calls_are_dropped_with_their_problem() -> None:
    calls = collected(
        ToolCallDelta(0, "a", "echo", "{"), ToolCallDelta(1, "b", "time", "{}"), ToolCallDelta(0, problem="cut off")
    )
    assert calls.calls == [ToolCall("b", "time", "{}")]
    assert calls.problem == "cut off"


@pytest.mark.push
@given(st.lists(deltas))
def test_all_calls_have_a_name_and_an_id_of_their_own(pieces: list[ToolCallDelta]) -> None:
    calls = collected(*pieces).calls
    assert all(call.id and call.name for call in calls)
    assert len({call.id for call in calls}) == len(calls)
