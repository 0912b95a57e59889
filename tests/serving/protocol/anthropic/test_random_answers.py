"""Tests with random events: a stream, as Anthropic's client assembles it, equals the whole message."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.types import FinishReason
from llmrun.engine.requests import Event, TextDelta, ToolCallDelta
from tests.support.protocol.answers import ended
from tests.support.protocol.anthropic_answers import TOOL, answer, assembled, official, streamed, whole

pytestmark = pytest.mark.push

TEXTS = st.text(max_size=4)
IDS = st.sampled_from(["", "call_0", "call_1", "abcdefghi"])
VALUES = st.none() | st.integers() | TEXTS | st.lists(TEXTS, max_size=2)
REASONS = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS])


@st.composite
def calls(draw: st.DrawFn, index: int) -> list[ToolCallDelta]:
    """Draw the pieces of a complete call, the first of which has its name."""
    arguments = json.dumps(draw(st.dictionaries(TEXTS, VALUES, max_size=2)), ensure_ascii=draw(st.booleans()))
    cuts = sorted(draw(st.sets(st.integers(0, len(arguments)), max_size=3)))
    pieces = [arguments[start:end] for start, end in zip([0, *cuts], [*cuts, len(arguments)], strict=True)]
    return [
        ToolCallDelta(index, draw(IDS), "look", pieces[0]),
        *(ToolCallDelta(index, arguments=piece) for piece in pieces[1:]),
    ]


@st.composite
def answers(draw: st.DrawFn) -> list[Event]:
    """Draw the events of an answer. Text is tentative only until it is certain."""
    may_close, n_calls, events = draw(st.booleans()), 0, list[Event]()
    for _ in range(draw(st.integers(0, 6))):
        unopened = may_close and draw(st.integers(0, 4)) == 0
        may_close = may_close and not unopened and draw(st.integers(0, 4)) > 0
        pieces = draw(calls(n_calls)) if not may_close and draw(st.booleans()) else []
        n_calls += bool(pieces)
        at = draw(st.integers(0, len(pieces)))
        first = TextDelta(0, draw(TEXTS), (1,), (), draw(TEXTS), unopened, may_close, tuple(pieces[:at]))
        events += [first, *(TextDelta(0, "", (1,), tool_calls=(piece,)) for piece in pieces[at:])]
    return [*events, ended(draw(REASONS))]


@given(answers(), st.sampled_from(["summarized", "omitted"]))
def test_an_assembled_stream_is_the_whole_message(events: list[Event], display: str) -> None:
    fields: dict[str, Any] = {"tools": [TOOL], "thinking": {"type": "adaptive", "display": display}}
    body = whole(answer(**fields), events)
    official(body)
    chunks = streamed(answer(stream=True, **fields), events)
    assert comparable(assembled(chunks)) == comparable(body)
    check_order(chunks)
    ids = [block["id"] for block in body["content"] if block["type"] == "tool_use"]
    assert len({*ids}) == len(ids)


def comparable(body: dict[str, Any]) -> dict[str, Any]:
    """Return what a stream and a whole message must have in common."""
    return {name: body[name] for name in ("id", "model", "content", "stop_reason", "stop_sequence", "usage", "seed")}


def check_order(chunks: list[dict[str, Any]]) -> None:
    """Check that one block is open at a time, and that the blocks are numbered."""
    count, is_open = 0, False
    for chunk in chunks[1:-2]:
        starts, stops = chunk["type"] == "content_block_start", chunk["type"] == "content_block_stop"
        assert starts != is_open
        count += starts
        assert chunk["index"] == count - 1
        is_open = not stops
    assert not is_open
    assert [chunks[0]["type"], *(chunk["type"] for chunk in chunks[-2:])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
