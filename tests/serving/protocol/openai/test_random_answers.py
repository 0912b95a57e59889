"""Tests with random events: a stream, as OpenAI's client assembles it, equals the whole answer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.types import FinishReason
from llmrun.engine.requests import Event, TextDelta
from tests.support.protocol.answers import (
    TOOL,
    as_json,
    assembled,
    chat_answer,
    completion_answer,
    ended,
    official_chat,
    official_chunk,
    official_completion,
    run,
    whole,
)
from tests.support.protocol.events import LOGPROBS, TEXTS, chats

pytestmark = pytest.mark.push


@st.composite
def interleaved(draw: st.DrawFn, choices: list[list[Event]]) -> list[tuple[int, Event]]:
    order = draw(st.permutations([index for index, events in enumerate(choices) for _ in events]))
    streams = [iter(events) for events in choices]
    return [(index, next(streams[index])) for index in order]


@given(st.lists(chats(), min_size=1, max_size=3), st.data())
def test_an_assembled_stream_is_the_whole_answer(choices: list[list[Event]], data: st.DataObject) -> None:
    options = {"n": len(choices), "tools": [TOOL], "logprobs": True, "top_logprobs": 1}
    events = data.draw(interleaved(choices))
    chunks = run(chat_answer(stream=True, stream_options={"include_usage": True}, **options), events)
    for chunk in chunks:
        official_chunk(chunk)
    body = whole(chat_answer(**options), events)
    official_chat(body)
    assert comparable(assembled(chunks)) == comparable(as_json(body))
    for choice in body["choices"]:
        ids = [call["id"] for call in choice["message"].get("tool_calls", ())]
        assert len({*ids}) == len(ids)


def comparable(body: dict[str, Any]) -> dict[str, Any]:
    """Return what a stream and a whole answer must have in common."""
    choices = []
    for choice in body["choices"]:
        message = choice["message"]
        tokens = (choice.get("logprobs") or {}).get("content") or []
        calls = [
            (each["id"], each["type"], each["function"]["name"], each["function"]["arguments"])
            for each in message.get("tool_calls") or ()
        ]
        texts = message.get("content") or "", message.get("reasoning_content") or ""
        choices.append((choice["index"], texts, calls, tokens, choice["finish_reason"]))
    same = ("id", "object", "created", "model", "system_fingerprint", "seed", "usage")
    return {**{name: body[name] for name in same}, "choices": choices}


@st.composite
def continuations(draw: st.DrawFn) -> list[Event]:
    deltas = [TextDelta(0, draw(TEXTS), (1,), tuple(draw(LOGPROBS))) for _ in range(draw(st.integers(0, 6)))]
    return [*deltas, ended(draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])))]


@given(st.lists(continuations(), min_size=1, max_size=3), st.data())
def test_a_streamed_completion_is_the_whole_one(choices: list[list[Event]], data: st.DataObject) -> None:
    options = {"prompt": ["a"] * len(choices), "logprobs": 1}
    events = data.draw(interleaved(choices))
    chunks = run(completion_answer(stream=True, **options), events)
    body = as_json(whole(completion_answer(**options), events))
    official_completion(body)
    for index, choice in enumerate(body["choices"]):
        parts = [each for chunk in chunks for each in chunk["choices"] if each["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts] == [*[None] * (len(parts) - 1), choice["finish_reason"]]
        for name in ("tokens", "token_logprobs", "text_offset"):
            streamed = [value for part in parts for value in (part["logprobs"] or {}).get(name, ())]
            assert streamed == choice["logprobs"][name]
