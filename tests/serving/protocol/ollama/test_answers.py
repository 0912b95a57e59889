"""Tests of the answers of Ollama's API."""

from __future__ import annotations

from typing import Any

import pytest

from llmrun.base.errors import BackendCrashed, InvalidAnswer, Unavailable
from llmrun.base.types import FinishReason
from llmrun.engine.requests import Event, Failed, PrefillProgress, ToolCallDelta
from llmrun.serving.protocol.errors import api_error
from llmrun.serving.protocol.ollama.answers import OLLAMA
from tests.support.protocol.answers import TOOL, called, chosen, ended, said
from tests.support.protocol.ollama import chat_answer, generate_answer, streamed, whole

HEAD = {"model": "tiny", "created_at": "2023-11-14T22:13:20.000000Z"}
COUNTS = {
    "total_duration": 700_000_000,
    "load_duration": 0,
    "prompt_eval_count": 10,
    "prompt_eval_duration": 300_000_000,
    "eval_count": 3,
    "eval_duration": 200_000_000,
}
OWN = {"seed", "system_fingerprint", "timings"}


def without_own(chunk: dict[str, Any]) -> dict[str, Any]:
    """Return a last chunk without the fields that only llmrun has."""
    assert {*chunk} >= OWN
    return {name: value for name, value in chunk.items() if name not in OWN}


def test_chats_are_streamed_as_lines() -> None:
    events: list[Event] = [PrefillProgress(0, 1, 1), said("He"), said(""), said("llo"), ended(FinishReason.LENGTH)]
    *chunks, last = streamed(chat_answer(), events)
    assert chunks == [
        {**HEAD, "message": {"role": "assistant", "content": text}, "done": False} for text in ("He", "llo")
    ]
    end = {"message": {"role": "assistant", "content": ""}, "done": True, "done_reason": "length"}
    assert without_own(last) == {**HEAD, **end, **COUNTS}


def test_whole_chats_have_the_message() -> None:
    events: list[Event] = [said("", reasoning="Hm. "), said("He", reasoning="Yes."), said("llo"), ended()]
    message = {"role": "assistant", "content": "Hello", "thinking": "Hm. Yes."}
    body = without_own(whole(chat_answer(stream=False), events))
    assert body == {**HEAD, "message": message, "done": True, "done_reason": "stop", **COUNTS}


def test_completions_have_a_response() -> None:
    events: list[Event] = [said("He", reasoning="Hm."), said("llo"), ended()]
    *chunks, last = streamed(generate_answer(), events)
    assert chunks == [
        {**HEAD, "response": "", "thinking": "Hm.", "done": False},
        {**HEAD, "response": "He", "done": False},
        {**HEAD, "response": "llo", "done": False},
    ]
    assert without_own(last) == {**HEAD, "response": "", "done": True, "done_reason": "stop", **COUNTS}
    body = without_own(whole(generate_answer(stream=False), events))
    assert body == {**HEAD, "response": "Hello", "thinking": "Hm.", "done": True, "done_reason": "stop", **COUNTS}


def test_tool_calls_come_complete_in_one_chunk() -> None:
    events: list[Event] = [
        said("Let me look."),
        called(ToolCallDelta(0, "call_a", "look"), ToolCallDelta(0, arguments='{"at":')),
        called(ToolCallDelta(0, arguments='"sky"}'), ToolCallDelta(1, "call_b", "look", "{}")),
        ended(FinishReason.TOOL_CALLS),
    ]
    calls = [
        {"id": "call_a", "function": {"index": 0, "name": "look", "arguments": {"at": "sky"}}},
        {"id": "call_b", "function": {"index": 1, "name": "look", "arguments": {}}},
    ]
    text, tools, last = streamed(chat_answer(tools=[TOOL]), events)
    assert text["message"] == {"role": "assistant", "content": "Let me look."}
    assert tools == {**HEAD, "message": {"role": "assistant", "content": "", "tool_calls": calls}, "done": False}
    assert last["done_reason"] == "stop"
    body = whole(chat_answer(stream=False, tools=[TOOL]), events)
    assert body["message"] == {"role": "assistant", "content": "Let me look.", "tool_calls": calls}


def test_calls_that_were_cut_off_are_left_out() -> None:
    events: list[Event] = [
        called(ToolCallDelta(0, "call_a", "look", '{"at": "s', "cut off")),
        ended(FinishReason.LENGTH),
    ]
    (last,) = streamed(chat_answer(tools=[TOOL]), events)
    assert (last["message"], last["done_reason"]) == ({"role": "assistant", "content": ""}, "length")


@pytest.mark.parametrize("arguments", ["", "[]", "{", '{"a": NaN}', '{"a": 1e999}', "[" * 100_000])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_without_an_object_are_an_error(arguments: str, stream: bool) -> None:
    answer = chat_answer(stream=stream, tools=[TOOL])
    with pytest.raises(InvalidAnswer, match="the model's call of look"):
        streamed(answer, [called(ToolCallDelta(0, "call_a", "look", arguments)), ended()])


def test_logprobs_belong_to_the_text_of_their_chunk() -> None:
    tokens = [chosen(b"He", -0.5, (b"He", -0.5)), chosen(b"", -1.0), chosen(b"llo", -2.0)]
    events: list[Event] = [said(text, logprobs=(token,)) for text, token in zip(("He", "", "llo"), tokens, strict=True)]
    he, empty, llo = (
        {"token": "He", "logprob": -0.5, "bytes": [72, 101], "top_logprobs": [{"token": "He", "logprob": -0.5}]},
        {"token": "", "logprob": -1.0, "bytes": [], "top_logprobs": []},
        {"token": "llo", "logprob": -2.0, "bytes": [108, 108, 111], "top_logprobs": []},
    )
    he["top_logprobs"][0]["bytes"] = [72, 101]  # type: ignore[index]
    chunks = streamed(chat_answer(logprobs=True, top_logprobs=1), [*events, ended()])
    assert [chunk.get("logprobs") for chunk in chunks] == [[he], [empty, llo], None]
    body = whole(chat_answer(stream=False, logprobs=True, top_logprobs=1), [*events, ended()])
    assert body["logprobs"] == [he, empty, llo]


def test_calls_without_messages_load_the_model() -> None:
    message = {"role": "assistant", "content": ""}
    assert whole(chat_answer(messages=[]), []) == {**HEAD, "message": message, "done": True, "done_reason": "load"}
    body = whole(generate_answer(prompt=""), [])
    assert body == {**HEAD, "response": "", "done": True, "done_reason": "load"}


def test_failures_are_raised() -> None:
    with pytest.raises(BackendCrashed):
        chat_answer().feed(0, Failed(0, BackendCrashed("x")))
    with pytest.raises(Unavailable):
        chat_answer().feed(0, ended(FinishReason.CANCELLED))


def test_errors_are_one_text() -> None:
    error = api_error(Unavailable("x", state="loading"))
    assert OLLAMA.error(error) == OLLAMA.error_chunk(error) == {"error": "the model is loading"}
    assert OLLAMA.frame({"done": False}, "") == b'{"done":false}\n'
