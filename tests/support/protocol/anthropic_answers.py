"""Bodies, answers and official models for tests of Anthropic's API.

The official client is imported where it is used, because importing it takes seconds in each process that collects
tests.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from pydantic import TypeAdapter

from llmrun.engine.requests import ChatPrompt, Event, ModelFacts, Request
from llmrun.serving.protocol.anthropic import requests
from llmrun.serving.protocol.anthropic.answers import MessageAnswer
from tests.support.protocol.answers import FACTS, SEED, as_json, extras, sent

if TYPE_CHECKING:
    from anthropic.types import Message, ParsedMessage, RawMessageStreamEvent

USER = {"role": "user", "content": "Hi"}
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
_ADDITIONS = {"seed", "system_fingerprint"}


def message(facts: ModelFacts = FACTS, /, **fields: Any) -> requests.ParsedMessage:
    body = {"model": "tiny", "max_tokens": 10, "messages": [USER], **fields}
    return requests.parse_message(sent(body), facts, SEED)


def count(facts: ModelFacts = FACTS, /, **fields: Any) -> Request:
    return requests.parse_count(sent({"model": "tiny", "messages": [USER], **fields}), facts).requests[0]


def prompt_of(facts: ModelFacts = FACTS, /, **fields: Any) -> ChatPrompt:
    prompt = message(facts, **fields).request.prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def answer(**fields: Any) -> MessageAnswer:
    return MessageAnswer(message(seed=5, **fields), FACTS, "msg_1", 1_700_000_000)


def streamed(answering: MessageAnswer, events: Sequence[Event]) -> list[dict[str, Any]]:
    """Feed the events, and return all events of the stream after their way through JSON."""
    chunks = [chunk for event in events for chunk in answering.feed(0, event)]
    return [as_json(chunk) for chunk in [*chunks, *answering.finish()]]


def whole(answering: MessageAnswer, events: Sequence[Event]) -> dict[str, Any]:
    """Feed the events, and return the message after its way through JSON."""
    for event in events:
        answering.feed(0, event)
    body: dict[str, Any] = as_json(answering.whole())
    return body


def assembled(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that Anthropic's client makes of a stream."""
    from anthropic.lib.streaming._messages import accumulate_event

    snapshot: ParsedMessage[None] | None = None
    buffers: dict[int, bytes] = {}
    for chunk in chunks:
        event = _events().validate_python(chunk, strict=True)
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    return cast("ParsedMessage[None]", snapshot).to_dict()


@functools.cache
def _events() -> TypeAdapter[RawMessageStreamEvent]:
    from anthropic.types import RawMessageStreamEvent

    return TypeAdapter(RawMessageStreamEvent)


def official(body: dict[str, Any]) -> Message:
    """Validate a message, of which only the documented additions may be unknown."""
    from anthropic.types import Message

    model = Message.model_validate(body, strict=True)
    assert {*extras(model)} <= _ADDITIONS
    return model
