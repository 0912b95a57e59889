"""Tests of errors in Anthropic's form."""

from __future__ import annotations

import re

import pytest

from llmrun.base.errors import (
    BackendCrashed,
    ContextExceeded,
    InvalidAnswer,
    LlmrunError,
    ModelNotFound,
    Overloaded,
    TemplateRefused,
    Unavailable,
    UsageError,
)
from llmrun.serving.exchanges import wire_of
from llmrun.serving.protocol.anthropic.answers import ANTHROPIC
from llmrun.serving.protocol.errors import ApiError, InvalidField, api_error, unsupported
from tests.support.protocol.answers import as_json

# The form in which Claude Code recognizes a prompt that is too long
TOO_LONG = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", re.IGNORECASE)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidField("max_tokens", "wrong"), "invalid_request_error"),
        (UsageError("wrong"), "invalid_request_error"),
        (TemplateRefused("no"), "invalid_request_error"),
        (InvalidAnswer("no"), "invalid_request_error"),
        (ModelNotFound("no such model"), "not_found_error"),
        (Overloaded("the queue is full"), "rate_limit_error"),
        (Unavailable("loading"), "overloaded_error"),
        (BackendCrashed("x"), "api_error"),
        (LlmrunError("x"), "api_error"),
        (RuntimeError("x"), "api_error"),
    ],
)
def test_errors_have_the_types_of_the_api(error: Exception, kind: str) -> None:
    from anthropic.types import ErrorResponse  # importing it takes seconds

    body = as_json(ANTHROPIC.error(api_error(error)))
    assert body["error"]["type"] == kind
    assert ErrorResponse.model_validate(body, strict=True).error.message == api_error(error).message


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, "authentication_error"),
        (403, "permission_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
    ],
)
def test_other_errors_get_their_type_from_the_status(status: int, kind: str) -> None:
    assert ANTHROPIC.error(ApiError(status, "x", "y"))["error"]["type"] == kind


def test_agents_recognize_a_prompt_that_is_too_long() -> None:
    error = ContextExceeded.by_prompt(140_000, 131_072, hint="shorten the prompt")
    message = ANTHROPIC.error(api_error(error))["error"]["message"]
    found = TOO_LONG.match(message)
    assert found is not None
    assert (*map(int, found.groups()),) == (140_000, 131_072)
    assert message.endswith("shorten the prompt")


def test_clients_are_told_that_there_are_no_threads() -> None:
    error = ANTHROPIC.error(api_error(unsupported("thread")))["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request"}
    assert "details" not in ANTHROPIC.error(api_error(unsupported("container")))["error"]


def test_the_paths_of_messages_have_this_form() -> None:
    assert [wire_of(path) is ANTHROPIC for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/models")] == [
        True,
        True,
        False,
    ]
