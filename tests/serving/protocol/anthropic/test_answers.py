"""Tests of messages and of the events of a stream."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from llmrun.base.errors import BackendCrashed, Unavailable
from llmrun.base.types import FinishReason
from llmrun.engine.requests import Event, Failed, PrefillProgress, ToolCallDelta
from tests.support.protocol.answers import called, ended, said
from tests.support.protocol.anthropic_answers import TOOL, USER, answer, assembled, official, streamed, whole

CALL: list[Event] = [called(ToolCallDelta(0, "call_a", "look")), called(ToolCallDelta(0, arguments='{"at": "here"}'))]


def kinds(chunks: list[dict[str, Any]]) -> list[str]:
    """Return the types of events, and of the blocks and deltas in them."""
    inner = [chunk.get("content_block") or chunk.get("delta") or {} for chunk in chunks]
    return [
        ":".join(filter(None, (chunk["type"], each.get("type")))) for chunk, each in zip(chunks, inner, strict=True)
    ]


def test_a_message_has_its_text_and_counts() -> None:
    body = whole(answer(), [PrefillProgress(0, 10, 10), said("Hel"), said("lo"), ended()])
    official(body)
    assert body == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 6,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 3,
            "output_tokens_details": {"thinking_tokens": 0},
        },
        "seed": 5,
        "system_fingerprint": "fp_1",
    }


def test_a_stream_has_the_events_of_the_api() -> None:
    events: list[Event] = [
        PrefillProgress(0, 5, 10),
        PrefillProgress(0, 10, 10),
        said(reasoning="Hm."),
        said("Yes"),
        *CALL,
    ]
    chunks = streamed(answer(stream=True, tools=[TOOL]), [*events, ended(FinishReason.TOOL_CALLS, thinking=2)])
    assert kinds(chunks) == [
        "message_start",
        "content_block_start:thinking",
        "content_block_delta:thinking_delta",
        "content_block_delta:signature_delta",
        "content_block_stop",
        "content_block_start:text",
        "content_block_delta:text_delta",
        "content_block_stop",
        "content_block_start:tool_use",
        "content_block_delta:input_json_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert [chunk["index"] for chunk in chunks if "index" in chunk] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert chunks[0]["message"]["usage"]["input_tokens"] == 10
    assert chunks[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert assembled(chunks)["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"},
        {"type": "text", "text": "Yes"},
        {"type": "tool_use", "id": "call_a", "name": "look", "input": {"at": "here"}},
    ]


def test_the_first_event_counts_cached_tokens_apart() -> None:
    chunks = streamed(
        answer(stream=True), [PrefillProgress(0, 8, 10, 7), PrefillProgress(0, 10, 10, 7), said("Yes"), ended()]
    )
    usage = chunks[0]["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (3, 7, 0)


def test_the_number_of_events_does_not_depend_on_progress() -> None:
    """Otherwise, a stream could not be resumed."""
    events: list[Event] = [said("Yes"), ended()]
    assert len(streamed(answer(), events)) == len(streamed(answer(), [PrefillProgress(0, 10, 10), *events]))


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (ended(), "end_turn"),
        (ended(FinishReason.TOOL_CALLS), "tool_use"),
        (ended(FinishReason.LENGTH, generated_tokens=10), "max_tokens"),
        (ended(FinishReason.LENGTH, generated_tokens=9), "model_context_window_exceeded"),
    ],
)
def test_the_stop_reason_is_reported(end: Any, expected: str) -> None:
    body = whole(answer(max_tokens=10), [said("a"), end])
    official(body)
    assert body["stop_reason"] == expected


def test_a_stop_sequence_is_named() -> None:
    body = whole(answer(stop_sequences=["x"]), [said("a"), structs.replace(ended(), stop="x")])
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "x")


def test_text_after_a_call_is_a_block_of_its_own() -> None:
    body = whole(answer(tools=[TOOL]), [said("a"), *CALL, said("b"), ended()])
    assert [block["type"] for block in body["content"]] == ["text", "tool_use", "text"]


def test_a_message_can_be_empty() -> None:
    body = whole(answer(), [ended()])
    official(body)
    assert body["content"] == []
    assert kinds(streamed(answer(), [ended()])) == ["message_start", "message_delta", "message_stop"]


def test_thinking_can_be_left_out() -> None:
    fields = {"thinking": {"type": "adaptive", "display": "omitted"}}
    events: list[Event] = [said(reasoning="Hm"), said(reasoning="."), said("Yes"), ended()]
    body = whole(answer(**fields), events)
    assert body["content"][0] == {"type": "thinking", "thinking": "", "signature": "unsigned"}
    chunks = streamed(answer(**fields), events)
    assert "content_block_delta:thinking_delta" not in kinds(chunks)
    assert assembled(chunks)["content"] == body["content"]


def test_text_that_was_thinking_is_not_shown_as_text() -> None:
    events: list[Event] = [said("Hm", tentative=True), said("Yes", reasoning=".", unopened=True), ended()]
    expected = [{"type": "thinking", "thinking": "Hm.", "signature": "unsigned"}, {"type": "text", "text": "Yes"}]
    assert whole(answer(), events)["content"] == expected
    assert assembled(streamed(answer(), events))["content"] == expected


@pytest.mark.parametrize("arguments", ['{"command": "rm -rf /home/me', "", "[1]", "{}}"])
def test_unfinished_arguments_are_left_out(arguments: str) -> None:
    """Half of a command could do harm."""
    events: list[Event] = [called(ToolCallDelta(0, "call_a", "look", arguments, "cut off")), ended(FinishReason.LENGTH)]
    body = whole(answer(tools=[TOOL]), events)
    assert body["content"] == [{"type": "tool_use", "id": "call_a", "name": "look", "input": {}}]


def test_ids_of_earlier_calls_are_not_reused() -> None:
    past = {"role": "assistant", "content": [{"type": "tool_use", "id": "call_a", "name": "look", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_a"}]}
    fields = {"tools": [TOOL], "messages": [USER, past, result]}
    first, second = (whole(answer(**fields), [*CALL, ended()])["content"][0]["id"] for _ in range(2))
    assert first == second != "call_a"


def test_failures_are_raised() -> None:
    with pytest.raises(BackendCrashed):
        answer().feed(0, Failed(0, BackendCrashed("x")))
    with pytest.raises(Unavailable):
        answer().feed(0, ended(FinishReason.CANCELLED))
    with pytest.raises(RuntimeError):
        answer().whole()
