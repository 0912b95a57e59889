"""Tests of the form of errors in streams."""

from __future__ import annotations

from llmrun.serving.exchanges import wire_of
from llmrun.serving.protocol.errors import InvalidField, api_error
from llmrun.serving.protocol.openai_responses.answers import RESPONSES
from tests.support.protocol.answers import as_json
from tests.support.protocol.response_answers import official_event


def test_errors_are_events_of_both_forms() -> None:
    """One is the API's documented form, and for the other, OpenAI's client raises an error."""
    event = as_json(RESPONSES.error_chunk(api_error(InvalidField("input", "wrong"))))
    official_event(event)
    assert event["message"] == event["error"]["message"]
    assert RESPONSES.frame(event, "").startswith(b"event: error\ndata: {")


def test_the_form_is_that_of_the_paths() -> None:
    paths = ("/v1/responses", "/responses", "/v1/responses/resp_1", "/v1/chat/completions")
    assert [wire_of(path) is RESPONSES for path in paths] == [True, True, True, False]
