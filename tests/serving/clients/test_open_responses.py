"""Tests that answers have the schemas of Open Responses, as a package on PyPI publishes them."""

from __future__ import annotations

from typing import Any

import openresponses_types as spec
import pytest
from pydantic import BaseModel

from tests.support.serving.serve_process import Served

pytestmark = pytest.mark.clients

# Open Responses calls the events of thinking response.reasoning.delta and .done, and OpenAI reasoning_text. Our server
# uses OpenAI's names, so they are not among these models.
EVENTS: dict[str, type[BaseModel]] = {
    "response.created": spec.ResponseCreatedStreamingEvent,
    "response.in_progress": spec.ResponseInProgressStreamingEvent,
    "response.completed": spec.ResponseCompletedStreamingEvent,
    "response.incomplete": spec.ResponseIncompleteStreamingEvent,
    "response.output_item.added": spec.ResponseOutputItemAddedStreamingEvent,
    "response.output_item.done": spec.ResponseOutputItemDoneStreamingEvent,
    "response.content_part.added": spec.ResponseContentPartAddedStreamingEvent,
    "response.content_part.done": spec.ResponseContentPartDoneStreamingEvent,
    "response.output_text.delta": spec.ResponseOutputTextDeltaStreamingEvent,
    "response.output_text.done": spec.ResponseOutputTextDoneStreamingEvent,
    "response.function_call_arguments.delta": spec.ResponseFunctionCallArgumentsDeltaStreamingEvent,
    "response.function_call_arguments.done": spec.ResponseFunctionCallArgumentsDoneStreamingEvent,
}
TOOL = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def checked(body: dict[str, Any]) -> dict[str, Any]:
    spec.ResponseResource.model_validate(body)
    return body


def streamed(server: Served, **body: Any) -> list[str]:
    """Return the types of the events of a stream, of which each has its schema."""
    events = server.stream("/v1/responses", **body)
    for event in events:
        EVENTS[event["type"]].model_validate(event)
    return [event["type"] for event in events]


@pytest.mark.parametrize(
    "given",
    [
        "Say hello in exactly 3 words.",
        [{"type": "message", "role": "user", "content": "Say hello in exactly 3 words."}],
        [
            {"type": "message", "role": "system", "content": "You are a pirate."},
            {"type": "message", "role": "user", "content": "Say hello."},
        ],
        [
            {"type": "message", "role": "user", "content": "My name is Alice."},
            {"type": "message", "role": "assistant", "content": "Hello Alice!"},
            {"type": "message", "role": "user", "content": "What is my name?"},
        ],
    ],
)
def test_responses_of_a_real_model_match_their_schema(real: Served, given: Any) -> None:
    body = checked(real.post("/v1/responses", model=real.model, input=given, temperature=0))
    assert (body["status"], body["output"][0]["type"]) == ("completed", "message")
    assert checked(real.post("/v1/responses", input=given, max_output_tokens=2, **LOGPROBS))["status"] == "incomplete"


def test_streams_of_a_real_model_match_their_schemas(real: Served) -> None:
    kinds = streamed(real, input="Say hello in exactly 3 words.", temperature=0)
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_text.delta") > 3
    assert streamed(real, input="Count.", max_output_tokens=2, **LOGPROBS)[-1] == "response.incomplete"


def test_tool_calls_match_their_schemas(tools: Served) -> None:
    fields = {"input": "Weather?", "tools": [TOOL]}
    body = checked(tools.post("/v1/responses", **fields))
    assert [item["type"] for item in body["output"]] == ["function_call"]
    kinds = streamed(tools, **fields)
    assert "response.function_call_arguments.delta" in kinds
    assert "response.function_call_arguments.done" in kinds


def test_thinking_matches_its_schema(tools: Served) -> None:
    body = checked(tools.post("/v1/responses", input="Think?"))
    assert [item["type"] for item in body["output"]] == ["reasoning", "message"]
