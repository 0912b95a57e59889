"""Tests of the messages between the server and the engine's process."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from types import MappingProxyType
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

from llmrun.base import errors
from llmrun.base.errors import DoesNotFit, KVFull, LlmrunError, Overloaded, Unavailable, UsageError
from llmrun.base.processes.frames import BadMessage, Codec, encoded, error_from_json, error_to_json
from llmrun.base.types import ModelInfo, Timings
from llmrun.engine.child.messages import (
    FROM_CHILD,
    TO_CHILD,
    Ask,
    Beat,
    Cancel,
    Detokenized,
    FromChild,
    Open,
    Opened,
    Rejected,
    Stepped,
    ToChild,
)
from llmrun.engine.requests import ChatPrompt, Failed, ModelFacts, PrefillProgress, Request, TextPrompt
from llmrun.options.sampling_params import SamplingParams
from tests.support.serving.random_messages import EVENTS, IDS, PARAMS, REQUESTS

INFO = ModelInfo("m.gguf", "m", "llama", "Q4_0", 1, 2, 3, 4, 5, 6, "cpu", "2 threads", 2, suppressed_tokens=(7,))


def as_json(value: object) -> bytes:
    return b"\xc1" + encoded(value)


@pytest.mark.push
@given(IDS, REQUESTS, st.floats(0, 1e9), st.booleans())
def test_requests_survive_the_journey(number: int, request: Request, received: float, alone: bool) -> None:
    message = Ask(number, request, received, alone=alone)
    assert TO_CHILD.decode(TO_CHILD.encode(message)) == message


@pytest.mark.push
@given(st.lists(EVENTS, max_size=4).map(tuple), st.none() | st.builds(Beat, st.booleans(), st.floats(0, 9), steps=IDS))
def test_events_survive_the_journey(events: Any, beat: Beat | None) -> None:
    message = Stepped(events, beat)
    assert FROM_CHILD.decode(FROM_CHILD.encode(message)) == message


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
    assert FROM_CHILD.decode(FROM_CHILD.encode(Opened(facts))) == Opened(facts)
    assert FROM_CHILD.decode(FROM_CHILD.encode(Detokenized(1, data))) == Detokenized(1, data)


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
        back = FROM_CHILD.decode(FROM_CHILD.encode(message))
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
        Codec(kind)


def test_defaults_are_not_sent() -> None:
    message = Ask(1, Request(TextPrompt("hi")), 2.0)
    prompt = {"type": "TextPrompt", "text": "hi"}
    sent = {"type": "Ask", "id": 1, "request": {"type": "Request", "prompt": prompt}, "received": 2.0}
    assert msgpack.decode(TO_CHILD.encode(message)) == sent


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        ["Cancel", [1]],
        {"type": "Nothing"},
        {"type": 1},
        {"ids": [1]},
        {"type": "Cancel", "ids": 1},
        {"type": "Cancel", "ids": ["1"]},
        {"type": "Cancel", "ids": [True]},
        {"type": "Cancel", "ids": [1], "more": 2},
        {"type": "Cancel"},
        {"type": "Detokenize", "id": 1, "tokens": [1.5]},
        {"type": "Ask", "id": 1, "request": {"prompt": {"type": "TextPrompt", "text": None}}, "received": 0.0},
        {"type": "Ask", "id": 1, "request": {"prompt": "hi"}, "received": 0.0},
        {"type": "Open", "path": "m", "speculate": 1},
        {"type": "Stepped", "events": []},
    ],
)
@pytest.mark.parametrize("as_bytes", [msgpack.encode, as_json])
def test_invalid_messages_are_refused(value: object, as_bytes: Callable[[object], bytes]) -> None:
    with pytest.raises(BadMessage):
        TO_CHILD.decode(as_bytes(value))
    assert TO_CHILD.decode(as_bytes({"type": "Cancel", "ids": [1]})) == Cancel((1,))


@pytest.mark.push
@given(st.binary() | st.binary().map(b"\xc1".__add__))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(BadMessage):
        FROM_CHILD.decode(data)


@pytest.mark.push
@given(st.lists(EVENTS, max_size=4).map(tuple), st.data())
def test_damaged_messages_are_refused_or_decoded(events: Any, data: st.DataObject) -> None:
    """Damaged messages raise only BadMessage."""
    whole = FROM_CHILD.encode(Stepped(events))
    at = data.draw(st.integers(0, len(whole) - 1))
    damage = data.draw(st.binary(max_size=4))
    with suppress(BadMessage):
        FROM_CHILD.decode(whole[:at] + damage + whole[at + data.draw(st.integers(0, 2)) :])


def test_sizes_without_data_take_no_memory() -> None:
    for size in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"):
        with pytest.raises(BadMessage):
            FROM_CHILD.decode(b"\x82\xa4type\xa7Stepped\xa6events" + size)


def test_numbers_and_texts_of_any_kind_survive_the_journey() -> None:
    """Clients may send large integers, and file names may contain surrogates."""
    large: dict[str, Any] = {"role": "user", "content": "\ud800", "n": [2**64, -(2**200), 1e300, math.inf, None]}
    chat = Ask(1, Request(ChatPrompt([large], [large], template_kwargs={"n": 2**70}), adapters={"a": 0.5}), 2.0)
    assert TO_CHILD.decode(TO_CHILD.encode(chat)) == chat
    model = Open("/models/\udcff.gguf", options={"threads": None, "adapters": [["a", 0.5]]})
    assert TO_CHILD.decode(TO_CHILD.encode(model)) == model
    biased = Ask(1, Request(TextPrompt("\udcff"), sampling=SamplingParams(logit_bias={7: -math.inf}, seed=2**80)), 0.0)
    assert TO_CHILD.decode(TO_CHILD.encode(biased)) == biased
    [event] = FROM_CHILD.decode(FROM_CHILD.encode(Stepped((PrefillProgress(2**70, 1, 2),)))).events  # type: ignore[union-attr]
    assert event == PrefillProgress(2**70, 1, 2)
    beat = FROM_CHILD.decode(FROM_CHILD.encode(Beat(busy=True, wait_s=math.nan)))
    assert isinstance(beat, Beat)
    assert math.isnan(beat.wait_s)


def test_values_of_derived_types_are_sent_as_plain_ones() -> None:
    """Predicted times are numpy.float64, which is a subclass of float."""
    beat = FROM_CHILD.decode(FROM_CHILD.encode(Beat(busy=True, wait_s=np.float64(1.5))))
    assert beat == Beat(busy=True, wait_s=1.5)
    read_only = Open("m", options=MappingProxyType({"threads": 2, "n": 2**70}))
    assert TO_CHILD.decode(TO_CHILD.encode(read_only)) == Open("m", options={"threads": 2, "n": 2**70})


@pytest.mark.parametrize("innermost", [7, 2**70])
def test_deeply_nested_values_cannot_be_sent(innermost: int) -> None:
    nested: Any = innermost
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(RecursionError):
        TO_CHILD.encode(Ask(1, Request(ChatPrompt([{"content": nested}])), 0.0))
    for mark in (b"\x91", b"\xc1" + b"["):
        with pytest.raises(BadMessage):
            TO_CHILD.decode(mark + mark[-1:] * 100_000)


def test_other_objects_cannot_be_sent() -> None:
    with pytest.raises(TypeError):
        TO_CHILD.encode(Ask(1, Request(ChatPrompt([{"content": object()}])), 0.0))


def test_types_without_a_codec_are_refused() -> None:
    for hint in (TextPrompt | dict[str, int], Beat | Request | Timings):
        with pytest.raises(TypeError):
            Codec(hint)
