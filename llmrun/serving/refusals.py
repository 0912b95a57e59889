"""Errors of the HTTP layer itself, and the responses for all errors, in the form of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from llmrun.errors import LlmrunError
from llmrun.protocol.errors import ApiError, api_error, openai_body

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))

INVALID = "invalid_request_error"
SERVER = "server_error"


class Refused(LlmrunError):
    """A request that the HTTP layer refuses before it reaches a model. `status` is the HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error = ApiError(status, message, kind, code, param, headers or {})


def as_api_error(error: BaseException) -> ApiError:
    """Return what the client is told about an error. Bugs give a 500 without details."""
    return error.error if isinstance(error, Refused) else api_error(error)


def json_bytes(value: Any) -> bytes:
    """Encode JSON for a response. Lone surrogates, which a request can contain, become question marks."""
    return _ENCODER.encode(value).encode("utf-8", "replace")


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with this JSON value, or with bytes that are JSON already."""
    return Response(
        value if isinstance(value, bytes) else json_bytes(value),
        status_code=status,
        headers={"cache-control": "no-store", **(headers or {})},
        media_type="application/json",
    )


def json_bytes_of_choices(body: Mapping[str, Any]) -> bytes:
    """Return `json_bytes` of an answer without blocking other threads for long.

    Python's encoder lets no other thread run until it is done. Encoding 128 choices at once, with 20 log-probabilities
    per token, took a second, so each choice is encoded separately.
    """
    fields = []
    for name, value in body.items():
        content = b"[" + b",".join(map(json_bytes, value)) + b"]" if name == "choices" else json_bytes(value)
        fields.append(json_bytes(name) + b":" + content)
    return b"{" + b",".join(fields) + b"}"


def ignored_header(names: str) -> Mapping[str, str]:
    """Return the header that names the fields of a request that have no effect, so that none vanishes silently."""
    return {"x-llmrun-ignored": names} if names else {}


def error_response(error: BaseException) -> Response:
    """Return the response for an error."""
    told = as_api_error(error)
    return json_response(openai_body(told), status=told.status, headers=told.headers)
