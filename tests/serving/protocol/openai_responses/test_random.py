"""Tests with random requests and random events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.types import FinishReason
from llmrun.engine.requests import Event, TextDelta, ToolCallDelta, check_request
from llmrun.serving.protocol.openai_responses.requests import parse_response
from llmrun.serving.protocol.parsed import ignored_names
from tests.support.protocol.answers import FACTS, SEED, chosen, ended, sent
from tests.support.protocol.mutated import RESPONSE, mutated
from tests.support.protocol.refusals import accepted
from tests.support.protocol.response_answers import (
    FLAT_TOOL,
    LOGPROBS,
    answered,
    collected,
    content_of,
    response_answer,
    streamed,
)

TEXTS = st.text(max_size=4)
TOKENS = st.lists(st.binary(min_size=1, max_size=3).map(lambda text: chosen(text, -0.5, (text, -0.5))), max_size=2)
REASONS = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS])
IDS = st.sampled_from(["", "call_0", "call_1", "abcdefghi"])
OPTIONS: dict[str, Any] = {"tools": [FLAT_TOOL], "include": [LOGPROBS], "top_logprobs": 1}


@given(mutated(RESPONSE))
def test_random_calls_are_accepted_or_refused(body: dict[str, Any]) -> None:
    if accepted(lambda: parse_response(sent(body), FACTS, SEED)):
        parsed = parse_response(sent(body), FACTS, SEED)
        assert ignored_names(parsed.ignored).isascii()
        check_request(parsed.request, FACTS.info.vocabulary_size)


@st.composite
def calls(draw: st.DrawFn, n_begun: int) -> list[ToolCallDelta]:
    """Draw pieces of calls, one call after the other."""
    pieces = []
    for _ in range(draw(st.integers(0, 2))):
        is_new = n_begun == 0 or draw(st.booleans())
        n_begun += is_new
        name, call_id = ("look", draw(IDS)) if is_new else ("", "")
        problem = draw(st.sampled_from(["", "", "cut off"]))
        pieces.append(ToolCallDelta(n_begun - 1, call_id, name, draw(TEXTS), problem))
    return pieces


@st.composite
def answers(draw: st.DrawFn) -> list[Event]:
    """Draw the events of an answer. Text is tentative only until it is certain."""
    may_close, n_begun, events = draw(st.booleans()), 0, list[Event]()
    for _ in range(draw(st.integers(0, 6))):
        unopened = may_close and draw(st.integers(0, 4)) == 0
        may_close = may_close and not unopened and draw(st.integers(0, 4)) > 0
        pieces = [] if may_close else draw(calls(n_begun))
        n_begun = max([n_begun, *(piece.index + 1 for piece in pieces)])
        tokens = tuple(draw(TOKENS))
        events.append(
            TextDelta(0, draw(TEXTS), (1,), tokens, draw(TEXTS), unopened, may_close, tuple(pieces)),
        )
    return [*events, ended(draw(REASONS))]


@pytest.mark.night
@given(answers())
def test_a_stream_has_the_items_of_the_whole_response(events: list[Event]) -> None:
    body = answered(response_answer(**OPTIONS), *events)
    sent_events = streamed(response_answer(**OPTIONS), *events)
    assert sent_events[-1]["response"] == body
    ended_items = {event["output_index"]: event["item"] for event in sent_events if event["type"].endswith("item.done")}
    assert [ended_items[index] for index in range(len(ended_items))] == body["output"]
    assert collected(sent_events) == [content_of(item) for item in body["output"] if item["type"] != "reasoning"]
    check_deltas(sent_events, body["output"])
    check_items(body)


def check_deltas(events: list[dict[str, Any]], output: list[dict[str, Any]]) -> None:
    """Check that the deltas of an item, joined, are its content."""
    for index, item in enumerate(output):
        deltas = [event for event in events if event.get("output_index") == index and event["type"].endswith("delta")]
        assert {event["item_id"] for event in deltas} <= {item["id"]}
        assert "".join(event["delta"] for event in deltas) == content_of(item)
        if item["type"] == "message":
            assert [token for event in deltas for token in event["logprobs"]] == item["content"][0]["logprobs"]


def check_items(body: dict[str, Any]) -> None:
    """Check that only the last item can be incomplete, and only in an incomplete response."""
    statuses = [item["status"] for item in body["output"]]
    assert {*statuses[:-1]} <= {"completed"}
    if body["status"] == "completed":
        assert {*statuses} == {"completed"}
    ids = [item["call_id"] for item in body["output"] if item["type"] == "function_call"]
    assert len({*ids}) == len(ids)
