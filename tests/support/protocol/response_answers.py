"""Calls and answers of the Responses API, and the official models of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from llmrun.base.types import FinishReason
from llmrun.engine.requests import Event, ModelFacts, ToolCallDelta
from llmrun.serving.protocol.openai_responses.answers import ResponseAnswer
from llmrun.serving.protocol.openai_responses.requests import ParsedResponse, parse_response
from tests.support.protocol.answers import FACTS, SEED, as_json, called, ended, extras, said, sent

FLAT_TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
LOGPROBS = "message.output_text.logprobs"
_OURS = {"seed", "system_fingerprint", "timings", "store", "presence_penalty", "frequency_penalty"}
_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def response(facts: ModelFacts = FACTS, /, **fields: Any) -> ParsedResponse:
    return parse_response(sent({"model": "tiny", "input": "Hi", **fields}), facts, SEED)


def response_answer(**fields: Any) -> ResponseAnswer:
    return ResponseAnswer(response(seed=5, **fields), FACTS, "resp_1", 1_700_000_000)


def streamed(answer: ResponseAnswer, *events: Event) -> list[dict[str, Any]]:
    """Feed the events, and return all events of the stream, of which each must be an official one."""
    found = [chunk for event in events for chunk in answer.feed(0, event)]
    sent_events = [as_json(event) for event in [*found, *answer.finish()]]
    for event in sent_events:
        official_event(event)
    assert [event["sequence_number"] for event in sent_events] == [*range(len(sent_events))]
    return sent_events


def answered(answer: ResponseAnswer, *events: Event) -> dict[str, Any]:
    """Feed the events, and return the body, which must be an official one."""
    for event in events:
        answer.feed(0, event)
    body: dict[str, Any] = as_json(answer.whole())
    official_response(body)
    return body


def official_response(body: dict[str, Any]) -> Response:
    """Validate a response, of which only the documented additions may be unknown."""
    model = Response.model_validate(body, strict=True)
    assert {*extras(model)} <= _OURS
    return model


def official_event(event: dict[str, Any]) -> Any:
    """Validate an event of a stream. The client's models have no field `bytes` in the log-probabilities of deltas."""
    model = _EVENTS.validate_python(event, strict=True)
    known = {f"response.{name}" for name in _OURS} | {"logprobs.bytes", "logprobs.top_logprobs.bytes"}
    assert {*extras(model)} <= known | ({"error"} if event["type"] == "error" else set())
    return model


def collected(events: Sequence[dict[str, Any]]) -> list[str]:
    """Return the texts and arguments that OpenAI's client collects from the deltas of a stream, item by item.

    The client checks that the events fit together. It does not collect thinking.
    """
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=omit, text_format=omit)
    found: dict[int, str] = {}
    for event in events:
        for told in state.handle_event(official_event(event)):
            if told.type == "response.output_item.added" and told.item.type != "reasoning":
                found[told.output_index] = ""
            elif told.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
                found[told.output_index] = told.snapshot
    return [*found.values()]


def content_of(item: dict[str, Any]) -> str:
    """Return the text or the arguments of an item."""
    return str(item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


def said_and_called() -> list[Event]:
    """Return the events of an answer with thinking, text and a call."""
    pieces = ToolCallDelta(0, "call_a", "look", "{"), ToolCallDelta(0, arguments="}")
    return [said(reasoning="Hm."), said("So"), called(*pieces), ended(FinishReason.TOOL_CALLS)]
