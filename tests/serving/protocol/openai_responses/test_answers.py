"""Tests of responses and of the events of their streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from llmrun.base.errors import BackendCrashed, ContextExceeded, Overloaded, Unavailable
from llmrun.base.types import FinishReason
from llmrun.engine.requests import Event, Failed, PrefillProgress, ToolCallDelta
from llmrun.serving.protocol.errors import InvalidField, api_error
from llmrun.serving.protocol.openai_responses.answers import RESPONSES, ResponseAnswer
from tests.support.protocol.answers import FACTS, as_json, called, chosen, ended, said
from tests.support.protocol.response_answers import (
    FLAT_TOOL,
    LOGPROBS,
    answered,
    collected,
    official_event,
    official_response,
    response,
    response_answer,
    streamed,
)

WITH_LOGPROBS: dict[str, Any] = {"include": [LOGPROBS], "top_logprobs": 1}


def kinds(events: Sequence[Mapping[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_a_response_has_its_items_and_settings() -> None:
    body = answered(
        response_answer(tools=[FLAT_TOOL], instructions="Be brief.", metadata={"a": "b"}, temperature=0, user="me"),
        said(reasoning="Hm."),
        said("So"),
        called(ToolCallDelta(0, "call_a", "look", "{")),
        called(ToolCallDelta(0, arguments="}")),
        ended(FinishReason.TOOL_CALLS, thinking=2),
    )
    assert body["output"] == [
        {
            "id": "rs_1_0",
            "type": "reasoning",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {
            "id": "msg_1_1",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "So", "annotations": [], "logprobs": []}],
        },
        {
            "id": "fc_1_2",
            "type": "function_call",
            "status": "completed",
            "call_id": "call_a",
            "name": "look",
            "arguments": "{}",
        },
    ]
    assert (body["id"], body["created_at"], body["completed_at"]) == ("resp_1", 1_700_000_000, 1_700_000_001)
    assert (body["status"], body["incomplete_details"], body["error"]) == ("completed", None, None)
    assert (body["instructions"], body["metadata"], body["user"]) == ("Be brief.", {"a": "b"}, "me")
    assert (body["temperature"], body["store"], body["tool_choice"]) == (0.0, False, "auto")
    assert body["tools"] == [{**FLAT_TOOL, "description": None, "strict": None}]
    assert (body["seed"], body["system_fingerprint"], body["timings"]["predicted_n"]) == (5, "fp_1", 3)
    assert body["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 6},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 13,
    }


@pytest.mark.push
def test_a_stream_has_the_official_order() -> None:
    events = streamed(
        response_answer(tools=[FLAT_TOOL]),
        PrefillProgress(0, 5, 10),
        PrefillProgress(0, 10, 10),
        said(reasoning="Hm."),
        said("S"),
        said("o"),
        called(ToolCallDelta(0, "call_a", "look", "{")),
        called(ToolCallDelta(0, arguments="}")),
        ended(FinishReason.TOOL_CALLS),
    )
    assert kinds(events) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    assert collected(events) == ["So", "{}"]
    assert events[0]["response"]["output"] == []
    assert (events[0]["response"]["status"], events[-1]["response"]["status"]) == ("in_progress", "completed")
    added = [event["item"] for event in events if event["type"].endswith("item.added")]
    assert [(item["status"], item.get("content"), item.get("arguments")) for item in added] == [
        ("in_progress", [], None),
        ("in_progress", [], None),
        ("in_progress", None, ""),
    ]


def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    given: list[Event] = [said(reasoning="Hm."), said("So"), ended(FinishReason.LENGTH)]
    body = answered(response_answer(), *given)
    assert (body["status"], body["completed_at"]) == ("incomplete", None)
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in body["output"]] == ["completed", "incomplete"]
    assert streamed(response_answer(), *given)[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize("thought", [[], [said(reasoning="Hm.")]])
def test_an_answer_without_text_has_an_empty_message(thought: list[Event]) -> None:
    body = answered(response_answer(), *thought, ended())
    assert (body["output"][-1]["type"], body["output"][-1]["content"][0]["text"]) == ("message", "")
    assert collected(streamed(response_answer(), *thought, ended())) == [""]


def test_several_calls_are_several_items() -> None:
    given: list[Event] = [
        called(ToolCallDelta(0, "call_a", "look"), ToolCallDelta(0, arguments='{"a')),
        said("\n", tool_calls=(ToolCallDelta(0, arguments='": 1}'), ToolCallDelta(1, "call_a", "look", "{}"))),
        ended(FinishReason.TOOL_CALLS),
    ]
    body = answered(response_answer(tools=[FLAT_TOOL]), *given)
    calls = [item for item in body["output"] if item["type"] == "function_call"]
    assert [call["arguments"] for call in calls] == ['{"a": 1}', "{}"]
    assert len({call["call_id"] for call in calls}) == 2
    assert collected(streamed(response_answer(tools=[FLAT_TOOL]), *given)) == ['{"a": 1}', "\n", "{}"]


def test_text_that_was_thinking_is_no_message() -> None:
    given: list[Event] = [said("Hm.", tentative=True), said("So", unopened=True), ended()]
    body = answered(response_answer(), *given)
    assert [item["type"] for item in body["output"]] == ["reasoning", "message"]
    assert collected(streamed(response_answer(), *given)) == ["So"]


def test_held_back_text_is_flushed_at_the_end() -> None:
    body = answered(response_answer(), said("So", tentative=True), ended())
    assert official_response(body).output_text == "So"


def test_only_tokens_of_the_text_have_logprobs() -> None:
    one = chosen(b"a", -0.5, (b"a", -0.5))
    given: list[Event] = [
        said(reasoning="Hm", logprobs=(chosen(b"Hm"),)),
        said(logprobs=(chosen(b"\xc3"),)),
        said("é", logprobs=(one,)),
        called(ToolCallDelta(0, "call_a", "look")),
        ended(FinishReason.TOOL_CALLS),
    ]
    fields = {**WITH_LOGPROBS, "tools": [FLAT_TOOL]}
    body = answered(response_answer(**fields), *given)
    assert [token["bytes"] for token in body["output"][1]["content"][0]["logprobs"]] == [[0xC3], [97]]
    deltas = [event for event in streamed(response_answer(**fields), *given) if event["type"].endswith("text.delta")]
    assert deltas[1]["logprobs"] == body["output"][1]["content"][0]["logprobs"]


def test_tokens_that_were_thinking_have_no_logprobs() -> None:
    given: list[Event] = [
        said("Hm", tentative=True, logprobs=(chosen(b"Hm"),)),
        said("So", unopened=True, logprobs=(chosen(b"So"),)),
        ended(),
    ]
    body = answered(response_answer(**WITH_LOGPROBS), *given)
    assert [token["token"] for token in body["output"][1]["content"][0]["logprobs"]] == ["So"]


def test_too_many_logprobs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmrun.serving.protocol.openai.responses._MOST", 3)
    answer = response_answer(**WITH_LOGPROBS)
    answer.feed(0, said("a", logprobs=(chosen(b"a", -1.0, (b"a", -1.0)),)))
    with pytest.raises(InvalidField, match="log-probabilities"):
        answer.feed(0, said("a", logprobs=(chosen(b"a", -1.0, (b"a", -1.0)),)))


@pytest.mark.parametrize(
    ("error", "code", "inner"),
    [
        (BackendCrashed("secret"), "backend_crashed", "server_error"),
        (Overloaded("full", retry_after=1), "server_overloaded", "rate_limit_exceeded"),
        (ContextExceeded("too long"), "context_length_exceeded", "invalid_prompt"),
    ],
)
def test_a_stream_that_fails_ends_with_the_error_and_the_response(error: Exception, code: str, inner: str) -> None:
    answer = response_answer()
    before = answer.feed(0, said("So"))
    told, failed = [as_json(event) for event in answer.failed(api_error(error))]
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == inner
    assert failed["response"]["output"][0]["content"][0]["text"] == "So"
    assert (told["type"], told["code"], told["error"]["code"]) == ("error", code, code)
    assert [told["sequence_number"], failed["sequence_number"]] == [len(before), len(before) + 1]
    for event in (told, failed):
        official_event(event)


def test_a_stream_that_fails_at_once_begins_first() -> None:
    events = response_answer().failed(api_error(RuntimeError()))
    assert kinds(events) == ["created", "in_progress", "error", "failed"]


@pytest.mark.parametrize("event", [Failed(0, BackendCrashed("x")), ended(FinishReason.CANCELLED)])
def test_failures_are_raised(event: Event) -> None:
    with pytest.raises((BackendCrashed, Unavailable)):
        response_answer().feed(0, event)


def test_a_repeated_answer_has_the_same_bytes() -> None:
    given: list[Event] = [said("a"), called(ToolCallDelta(0, "", "look", "{}")), ended(FinishReason.TOOL_CALLS)]

    def written() -> list[bytes]:
        answer = ResponseAnswer(response(tools=[FLAT_TOOL]), FACTS, "resp_abc", 1)
        chunks = [chunk for event in given for chunk in answer.feed(0, event)]
        return [RESPONSES.frame(chunk, "") for chunk in [*chunks, *answer.finish()]]

    assert written() == written()
    assert written()[0].startswith(b"event: response.created\ndata: {")


def test_past_call_ids_are_not_reused() -> None:
    past = {"type": "function_call", "call_id": "call_a", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "call_a", "output": "x"}
    answer = response_answer(input=[past, output], tools=[FLAT_TOOL])
    body = answered(answer, called(ToolCallDelta(0, "call_a", "look", "{}")), ended(FinishReason.TOOL_CALLS))
    assert body["output"][0]["call_id"] != "call_a"
