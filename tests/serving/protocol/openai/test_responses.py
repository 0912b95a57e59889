"""Tests of answers: the bodies and chunks that OpenAI's client gets for the engine's events."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import Completion

from llmrun.base.errors import BackendCrashed, Unavailable
from llmrun.base.types import FinishReason
from llmrun.engine.requests import Event, Failed, PrefillProgress, PromptDelta, ToolCallDelta
from llmrun.serving.protocol.errors import InvalidField
from tests.support.protocol.answers import (
    TOOL,
    USER,
    as_json,
    assembled,
    called,
    chat_answer,
    chosen,
    completion_answer,
    ended,
    official_chat,
    official_chunk,
    official_completion,
    run,
    said,
    whole,
)

CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def of(*events: Event) -> list[tuple[int, Event]]:
    return [(0, event) for event in events]


def deltas(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]


def test_a_whole_chat_completion_has_the_official_form() -> None:
    answer = chat_answer()
    run(answer, of(PrefillProgress(0, 5, 10), said("Hel"), said("lo"), ended(thinking=1)))
    body = answer.whole()
    official_chat(body)
    assert {name: body[name] for name in ("id", "object", "created", "model", "system_fingerprint", "seed")} == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "system_fingerprint": "fp_1",
        "seed": 5,
    }
    message = {"role": "assistant", "content": "Hello", "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }


def test_a_streamed_chat_completion_has_the_official_form() -> None:
    chunks = run(chat_answer(stream=True), of(said("Hel"), said(), said("lo"), ended()))
    assert [official_chunk(chunk).id for chunk in chunks] == ["chatcmpl-1"] * 4
    assert deltas(chunks) == [{"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}, {}]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None, None, None, "stop"], "clients break if the field is missing"
    assert all("usage" not in chunk for chunk in chunks)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_the_usage_chunk_comes_last_and_only_on_request() -> None:
    answer = chat_answer(stream=True, stream_options={"include_usage": True})
    *chunks, last = run(answer, of(said("Hi"), ended()))
    assert [chunk["usage"] for chunk in chunks] == [None] * 3
    assert (last["choices"], last["usage"]) == ([], answer.whole()["usage"])
    official_chunk(last)


def test_timings_are_those_of_llama_server() -> None:
    answer = chat_answer(stream=True)
    chunks = run(answer, of(said("Hi"), ended(drafted_tokens=4, accepted_tokens=1)))
    assert answer.whole()["timings"] == chunks[-1]["timings"]
    assert chunks[-1]["timings"] == {
        "cache_n": 4,
        "prompt_n": 6,
        "prompt_ms": 300.0,
        "prompt_per_token_ms": 50.0,
        "prompt_per_second": 20.0,
        "predicted_n": 3,
        "predicted_ms": 200.0,
        "predicted_per_token_ms": 100.0,
        "predicted_per_second": 10.0,
        "draft_n": 4,
        "draft_n_accepted": 1,
    }


def test_no_chunk_precedes_the_answer() -> None:
    """A request that fails in the queue or in its prompt can thus still get an HTTP status."""
    assert chat_answer(stream=True).feed(0, PrefillProgress(0, 1, 10)) == []


def test_thinking_is_separate() -> None:
    answer = chat_answer(stream=True)
    chunks = run(answer, of(said(reasoning="Hm"), said("Yes", reasoning="."), ended()))
    assert deltas(chunks)[1:-1] == [{"reasoning_content": "Hm"}, {"reasoning_content": "."}, {"content": "Yes"}]
    message = answer.whole()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes")


def test_text_that_may_be_thinking_is_held_back() -> None:
    answer = chat_answer(stream=True)
    events = of(said("So", tentative=True), said(" it is", tentative=True), said("Yes", unopened=True), ended())
    chunks = run(answer, events)
    assert deltas(chunks)[1:-1] == [{"reasoning_content": "So it is"}, {"content": "Yes"}]
    assert answer.whole()["choices"][0]["message"]["reasoning_content"] == "So it is"


@pytest.mark.parametrize("events", [of(said("b"), ended()), of(said("b", tentative=True), ended())])
def test_held_text_is_sent_when_it_is_certain(events: list[tuple[int, Event]]) -> None:
    answer = chat_answer(stream=True)
    chunks = run(answer, [*of(said("a", tentative=True)), *events])
    assert deltas(chunks)[1:-1] == [{"content": "ab"}]
    assert answer.whole()["choices"][0]["message"]["content"] == "ab"


def test_tool_calls_have_the_official_form() -> None:
    answer = chat_answer(stream=True, tools=[TOOL])
    pieces = [
        called(ToolCallDelta(0, "call_a", "look")),
        called(ToolCallDelta(0, arguments='{"a"')),
        called(ToolCallDelta(0, arguments=": 1}"), ToolCallDelta(1, "call_b", "look", "{}")),
    ]
    chunks = run(answer, of(*pieces, ended(FinishReason.TOOL_CALLS)))
    first, second = deltas(chunks)[1:3]
    assert first == {
        "tool_calls": [{"index": 0, "id": "call_a", "type": "function", "function": {"name": "look", "arguments": ""}}]
    }
    assert second == {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}
    body = answer.whole()
    official_chat(body)
    choice = body["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    calls = [(call["id"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]
    assert calls == [("call_a", '{"a": 1}'), ("call_b", "{}")]
    assert assembled(chunks)["choices"][0]["message"]["tool_calls"][1]["id"] == "call_b"


def test_ids_of_calls_are_unique_in_a_conversation() -> None:
    """Some models write the IDs themselves and repeat them."""
    messages = [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": ""}, USER]
    events = of(
        called(ToolCallDelta(0, "call_1", "look", "{}")),
        called(ToolCallDelta(1, "call_2", "look", "{}")),
        called(ToolCallDelta(2, "call_2", "look", "{}")),
        called(ToolCallDelta(3, "", "look", "{}")),
        ended(FinishReason.TOOL_CALLS),
    )
    ids = []
    for _ in range(2):
        answer = chat_answer(stream=True, tools=[TOOL], messages=messages)
        streamed = assembled(run(answer, events))["choices"][0]["message"]["tool_calls"]
        calls = answer.whole()["choices"][0]["message"]["tool_calls"]
        assert [call["id"] for call in streamed] == [call["id"] for call in calls]
        ids.append([call["id"] for call in calls])
    assert ids[0] == ids[1], "the same seed gives the same IDs"
    assert ids[0][1] == "call_2"
    assert len({*ids[0], "call_1", ""}) == 6


def test_a_call_that_is_cut_off_keeps_its_arguments() -> None:
    answer = chat_answer(stream=True, tools=[TOOL])
    events = of(
        called(ToolCallDelta(0, "call_a", "look", '{"a')),
        called(ToolCallDelta(0, problem="cut off")),
        ended(FinishReason.LENGTH),
    )
    chunks = run(answer, events)
    (call,) = answer.whole()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"a'
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert len(chunks) == 3


def test_logprobs_have_bytes() -> None:
    options = {"logprobs": True, "top_logprobs": 1}
    euro = "€".encode()
    events = of(
        said(logprobs=(chosen(euro[:2], -0.25, (euro[:2], -0.25)),)),
        said("€", logprobs=(chosen(euro[2:], float("-inf"), (b"a", -1.0)),)),
        ended(),
    )
    chunks = run(chat_answer(stream=True, **options), events)
    content = [chunk["choices"][0]["logprobs"]["content"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert len(content) == 1, "tokens without text are sent with the next text"
    first, second = content[0]
    assert first == {
        "token": "\ufffd",
        "logprob": -0.25,
        "bytes": [0xE2, 0x82],
        "top_logprobs": [{"token": "\ufffd", "logprob": -0.25, "bytes": [0xE2, 0x82]}],
    }
    assert (second["logprob"], second["bytes"]) == (-9999.0, [0xAC])
    body = whole(chat_answer(**options), events)
    official_chat(body)
    assert body["choices"][0]["logprobs"] == {"content": [first, second], "refusal": None}


def test_the_logprobs_of_an_answer_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmrun.serving.protocol.openai.responses._MOST", 5)
    answer = chat_answer(logprobs=True, top_logprobs=1, n=2)
    piece = said("a", logprobs=(chosen(b"a", -0.5, (b"a", -0.5)),))
    answer.feed(0, piece)
    answer.feed(1, piece)
    with pytest.raises(InvalidField, match="more than 5 log-probabilities") as caught:
        answer.feed(0, piece)
    assert caught.value.param == "logprobs"


def test_logprobs_after_the_last_text_are_not_lost() -> None:
    chunks = run(chat_answer(logprobs=True), of(said(logprobs=(chosen(b"x"),)), ended()))
    assert chunks[-1]["choices"][0]["logprobs"]["content"][0]["token"] == "x"


def test_choices_are_interleaved_by_index() -> None:
    answer = chat_answer(stream=True, n=2)
    chunks = run(answer, [(1, said("b")), (0, said("a")), (1, ended(FinishReason.LENGTH)), (0, ended())])
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [0, 1, 1, 0, 1, 0]
    choices = assembled(chunks)["choices"]
    assert [(each["message"]["content"], each["finish_reason"]) for each in choices] == [("a", "stop"), ("b", "length")]
    usage = answer.whole()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (10, 6), "the prompt counts once"


def test_cached_tokens_are_those_of_the_choice_that_computed_the_prompt() -> None:
    answer = chat_answer(n=2)
    run(answer, [(0, ended(cached_tokens=9)), (1, ended(cached_tokens=4))])
    assert answer.whole()["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def test_failures_are_raised() -> None:
    for answer in (chat_answer(), completion_answer()):
        with pytest.raises(BackendCrashed):
            answer.feed(0, Failed(0, BackendCrashed("x")))
        with pytest.raises(Unavailable) as caught:
            answer.feed(0, ended(FinishReason.CANCELLED))
        assert caught.value.state == "draining"


def test_an_unfinished_answer_has_no_body() -> None:
    answer = chat_answer(n=2)
    answer.feed(0, ended())
    with pytest.raises(RuntimeError, match="not all choices"):
        answer.whole()


# --- completions


def test_a_whole_completion_has_the_official_form() -> None:
    answer = completion_answer()
    run(answer, of(said("Hel"), said("lo"), ended(FinishReason.LENGTH)))
    body = answer.whole()
    official_completion(body)
    choice = {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "length"}
    assert (body["object"], body["choices"], body["seed"]) == ("text_completion", [choice], 5)


def test_a_streamed_completion_has_the_official_form() -> None:
    answer = completion_answer(stream=True, stream_options={"include_usage": True})
    chunks = run(answer, of(said("Hel"), said("lo"), ended()))
    texts = [(each["text"], each["finish_reason"]) for chunk in chunks for each in chunk["choices"]]
    assert texts == [("Hel", None), ("lo", None), ("", "stop")]
    assert [chunk["usage"] is None for chunk in chunks] == [True, True, True, False]
    Completion.model_validate(chunks[2], strict=True)
    Completion.model_validate(chunks[3], strict=True)


def test_several_prompts_are_counted_once_each() -> None:
    answer = completion_answer(prompt=["a", "b"], n=2)
    events: list[tuple[int, Event]] = [(index, said(str(index))) for index in (3, 1, 0, 2)]
    run(answer, [*events, *((index, ended(prompt_tokens=10 + index // 2)) for index in range(4))])
    body = answer.whole()
    assert [(each["index"], each["text"]) for each in body["choices"]] == [(0, "0"), (1, "1"), (2, "2"), (3, "3")]
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (21, 12, 33)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 8}


def test_echo_comes_before_the_answer() -> None:
    answer = completion_answer(prompt=["a", "b"], echo=True, stream=True)
    events: list[tuple[int, Event]] = [
        (1, PromptDelta(1, "b")),
        (0, PromptDelta(0, "a")),
        (1, said("!")),
        (0, said("?")),
    ]
    chunks = run(answer, [*events, (0, ended()), (1, ended())])
    texts = ["", ""]
    for chunk in chunks:
        for each in chunk["choices"]:
            texts[each["index"]] += each["text"]
    assert texts == ["a?", "b!"] == [each["text"] for each in answer.whole()["choices"]]


def echoed(text: str, *tokens: tuple[bytes, float]) -> PromptDelta:
    """Return a piece of a prompt. The likeliest token at each position, except the first one, is `x`."""
    entries = [chosen(*token, (b"x", -0.25)) if token[1] else chosen(*token) for token in tokens]
    return PromptDelta(0, text, tuple(entries))


@pytest.mark.parametrize("stream", [False, True])
def test_a_repeated_prompt_has_logprobs(stream: bool) -> None:
    prompt = echoed("Hé you", (b"<s>", 0.0), (b" H", -1.0), ("é".encode(), -2.0))
    events = of(prompt, echoed("", (b" you", -3.0)), said("!", logprobs=(chosen(b"!", -0.5, (b"x", -0.75)),)), ended())
    answer = completion_answer(prompt="Hé you", echo=True, logprobs=1, stream=stream)
    choices = [chunk["choices"][0] for chunk in run(answer, events) if chunk["choices"]]
    pieces = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    if not stream:
        pieces = [answer.whole()["choices"][0]["logprobs"]]
    assert {key: [value for piece in pieces for value in piece[key]] for key in pieces[0]} == {
        "tokens": ["<s>", " H", "é", " you", "!"],
        "token_logprobs": [None, -1.0, -2.0, -3.0, -0.5],
        "top_logprobs": [
            None,
            {"x": -0.25, " H": -1.0},
            {"x": -0.25, "é": -2.0},
            {"x": -0.25, " you": -3.0},
            {"x": -0.75, "!": -0.5},
        ],
        "text_offset": [0, 0, 1, 2, 6],
    }
    assert answer.whole()["choices"][0]["text"] == "Hé you!"


def test_a_prompt_of_one_token_has_no_numbers() -> None:
    answer = completion_answer(prompt="H", echo=True, logprobs=1)
    run(answer, of(echoed("H", (b"H", 0.0)), ended(FinishReason.LENGTH)))
    logprobs = answer.whole()["choices"][0]["logprobs"]
    assert logprobs == {"tokens": ["H"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}


def test_completion_logprobs_are_parallel_lists() -> None:
    euro = "€".encode()
    events = of(
        said("Hi", logprobs=(chosen(b"Hi", -0.5, (b"Ho", -0.25), (b"Hi", -0.5)),)),
        said(logprobs=(chosen(euro[:1], -1.0, (b"x", -0.5), (b"y", -0.75)),)),
        said("€", logprobs=(chosen(euro[1:], -1.0, (b"x", -2.0), (b"x", -3.0)),)),
        said("!", logprobs=(chosen(b"!", float("-inf"), (b"x", -2.0), (b"y", -3.0)),)),
        ended(),
    )
    chunks = run(completion_answer(logprobs=2, stream=True), events)
    wanted = {
        "tokens": ["Hi", r"bytes:\xe2", r"bytes:\x82\xac", "!"],
        "token_logprobs": [-0.5, -1.0, -1.0, -9999.0],
        "top_logprobs": [
            {"Ho": -0.25, "Hi": -0.5},
            {"x": -0.5, "y": -0.75, r"bytes:\xe2": -1.0},
            {"x": -2.0, r"bytes:\x82\xac": -1.0},
            {"x": -2.0, "y": -3.0, "!": -9999.0},
        ],
        "text_offset": [0, 2, 2, 3],
    }
    body = whole(completion_answer(logprobs=2), events)
    official_completion(body)
    assert as_json(body)["choices"][0]["logprobs"] == wanted
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert {name: [value for each in streamed for value in each[name]] for name in wanted} == wanted


def test_no_likeliest_tokens_without_a_number() -> None:
    answer = completion_answer(logprobs=0)
    run(answer, of(said("a", logprobs=(chosen(b"a"),)), ended()))
    assert answer.whole()["choices"][0]["logprobs"]["top_logprobs"] is None
