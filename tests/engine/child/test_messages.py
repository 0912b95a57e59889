"""Tests of the messages between the server and the engine's process."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base import errors
from llmrun.base.errors import DoesNotFit, KVFull, LlmrunError, Overloaded, Unavailable, UsageError
from llmrun.base.types import ModelInfo
from llmrun.engine.child.messages import (
    Ask,
    BadMessage,
    Beat,
    Cancel,
    Detokenized,
    FromChild,
    Opened,
    Rejected,
    Stepped,
    ToChild,
    codec_of,
    decode_from_child,
    decode_to_child,
    encode_from_child,
    encode_to_child,
    error_from_json,
    error_to_json,
)
from llmrun.engine.isolated_worker import encoded
from llmrun.engine.requests import Failed, ModelFacts, Request, TextPrompt
from llmrun.options.sampling_params import SamplingParams
from tests.support.serving.random_messages import EVENTS, IDS, PARAMS, REQUESTS

INFO = ModelInfo("m.gguf", "m", "llama", "Q4_0", 1, 2, 3, 4, 5, 6, "cpu", "2 threads", 2, suppressed_tokens=(7,))


@pytest.mark.push
@given(IDS, REQUESTS, st.floats(0, 1e9), st.booleans())
def test_requests_survive_the_journey(number: int, request: Request, received: float, alone: bool) -> None:
    message = Ask(number, request, received, alone=alone)
    assert decode_to_child(encode_to_child(message)) == message


@pytest.mark.push
@given(st.lists(EVENTS, max_size=4).map(tuple), st.none() | st.builds(Beat, st.booleans(), st.floats(0, 9), steps=IDS))
def test_events_survive_the_journey(events: Any, beat: Beat | None) -> None:
    message = Stepped(events, beat)
    assert decode_from_child(encode_from_child(message)) == message


@given(PARAMS, st.binary())
def test_facts_and_bytes_survive_the_journey(params: SamplingParams, data: bytes) -> None:
    facts = ModelFacts(
        "a-model",
        INFO,
        100,
        takes_chats=True,
        takes_tools=False,
        fills=True,
        thinks=True,
        end_tokens=(1, 2),
        default_sampling=params,
        fingerprint="fp_1",
    )
    assert decode_from_child(encode_from_child(Opened(facts))) == Opened(facts)
    assert decode_from_child(encode_from_child(Detokenized(1, data))) == Detokenized(1, data)


@pytest.mark.parametrize(
    "error",
    [
        UsageError("no such token: 7", hint="choose another"),
        Overloaded("the queue is full", retry_after=2.5),
        Unavailable("not now", state="restarting", retry_after=3.0),
        DoesNotFit("too big", most_weights=5),
        KVFull("no room"),
    ],
)
def test_errors_survive_the_journey(error: LlmrunError) -> None:
    for message in (Rejected(1, error), Stepped((Failed(1, error),))):
        back = decode_from_child(encode_from_child(message))
        found = back.error if isinstance(back, Rejected) else back.events[0].error  # type: ignore[union-attr]
        assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))


def test_unknown_errors_become_the_nearest_known_one() -> None:
    class TooManyLayers(DoesNotFit):
        """An error that only its own module knows."""

    assert type(error_from_json(error_to_json(TooManyLayers("x")))) is DoesNotFit
    assert type(error_from_json({"error": "Newer", "message": "x", "hint": ""})) is LlmrunError
    assert type(error_from_json({"error": "KernelWarning", "message": "x"})) is LlmrunError
    assert type(error_from_json({"error": "annotations", "message": "x"})) is LlmrunError


def test_every_error_can_be_sent() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LlmrunError)]
    assert len(kinds) > 10
    assert [type(error_from_json(error_to_json(kind("x")))) for kind in kinds] == kinds


def test_every_message_has_a_codec() -> None:
    for kind in (*get_args(ToChild), *get_args(FromChild)):
        codec_of(kind)


def test_defaults_are_not_sent() -> None:
    message = Ask(1, Request(TextPrompt("hi")), 2.0)
    assert (
        encode_to_child(message) == b'["Ask",{"id":1,"request":{"prompt":["TextPrompt",{"text":"hi"}]},"received":2.0}]'
    )
    assert len(fields(Request)) > 5


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        ["Nothing", {}],
        ["Cancel", []],
        ["Cancel", {"ids": 1}],
        ["Cancel", {"ids": ["1"]}],
        ["Cancel", {"ids": [True]}],
        ["Cancel", {"ids": [1], "more": 2}],
        ["Cancel", {}],
        ["Detokenize", {"id": 1, "tokens": [1.5]}],
        ["Ask", {"id": 1, "request": {"prompt": ["TextPrompt", {"text": None}]}, "received": 0.0}],
        ["Ask", {"id": 1, "request": {"prompt": "hi"}, "received": 0.0}],
        ["Open", {"path": "m", "speculate": 1}],
    ],
)
def test_invalid_messages_are_refused(value: object) -> None:
    with pytest.raises(BadMessage):
        decode_to_child(encoded(value))
    assert decode_to_child(encoded(["Cancel", {"ids": [1]}])) == Cancel((1,))


def test_types_without_a_codec_are_refused() -> None:
    for hint in (complex, int | str, set):
        with pytest.raises(TypeError):
            codec_of(hint)
