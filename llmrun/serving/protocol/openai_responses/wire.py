"""The form of the Responses API's streams. Its error responses are those of chat completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from llmrun.serving.protocol.errors import ApiError, openai_body
from llmrun.serving.protocol.wire import OPENAI, typed_event


def error_event(error: ApiError, number: int = 0) -> dict[str, Any]:
    """Return the event for an error, with its number in the stream.

    OpenAI's client raises an error because of the field `error`; the other fields are those that the API documents.
    """
    flat = {"code": error.code, "message": error.message, "param": error.param}
    return {"type": "error", "sequence_number": number, **flat, **openai_body(error)}


RESPONSES: Final = replace(OPENAI, frame=typed_event, error_chunk=error_event)
