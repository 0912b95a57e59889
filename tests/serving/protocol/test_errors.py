"""Tests of errors as HTTP responses."""

from __future__ import annotations

import inspect
import math

import pytest

from llmrun.base import errors
from llmrun.base.errors import (
    BackendCrashed,
    ContextExceeded,
    DoesNotFit,
    InvalidAnswer,
    KVFull,
    LlmrunError,
    ModelFileError,
    ModelNotFound,
    NetworkError,
    Overloaded,
    TemplateRefused,
    Unavailable,
    UsageError,
)
from llmrun.serving.protocol.errors import InvalidField, api_error, openai_body, unsupported

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, LlmrunError)]


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (InvalidField("stop[1]", "empty"), 400, "invalid_value", "stop[1]"),
        (unsupported("audio"), 400, "unsupported_parameter", "audio"),
        (UsageError("template variable cannot be set: messages"), 400, "invalid_value", None),
        (ContextExceeded("5,000 tokens exceed 4,096"), 400, "context_length_exceeded", None),
        (TemplateRefused("chat template refuses this conversation"), 400, "template_refused", None),
        (ModelNotFound("no such model: a"), 404, "model_not_found", "model"),
        (InvalidAnswer("too complex"), 422, "invalid_answer", None),
        (Overloaded("the queue is full"), 429, "server_overloaded", None),
        (Unavailable("", state="restarting"), 503, "restarting", None),
        (BackendCrashed("x"), 500, "backend_crashed", None),
        (DoesNotFit("x"), 500, "out_of_memory", None),
        (KVFull("x"), 500, "out_of_memory", None),
        (ModelFileError("x"), 500, "model_failed", None),
        (NetworkError("x"), 500, None, None),
        (ZeroDivisionError("x"), 500, None, None),
    ],
)
def test_every_error_has_its_status(error: BaseException, status: int, code: str | None, param: str | None) -> None:
    found = api_error(error)
    assert (found.status, found.code, found.param) == (status, code, param)


def test_clients_do_not_retry_what_crashes_the_engine() -> None:
    assert api_error(BackendCrashed("x")).headers == {"x-should-retry": "false"}


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_no_error_of_ours_is_internal(kind: type[LlmrunError]) -> None:
    assert api_error(kind("about /home/me/x.gguf")).message != "internal error"


@pytest.mark.parametrize("kind", [*ALL, RuntimeError, KeyError], ids=lambda kind: kind.__name__)
def test_own_problems_name_no_path(kind: type[Exception]) -> None:
    found = api_error(kind("cannot be read: /home/me/x.gguf"))
    assert found.status in (400, 404, 422, 429) or "/home" not in str(openai_body(found))


def test_a_model_without_a_template_is_not_named_by_its_path() -> None:
    found = api_error(TemplateRefused("no chat template: /home/me/x.gguf: the file has none", hint="--raw"))
    assert found.message == "this model has no chat template; send a prompt to /v1/completions instead"


def test_messages_contain_the_hint() -> None:
    assert api_error(UsageError("stop: too long", hint="shorten it")).message == "stop: too long; shorten it"


def test_long_prompts_have_the_words_that_clients_look_for() -> None:
    message = api_error(ContextExceeded("5,000 tokens exceed 4,096", hint="shorten the prompt")).message
    assert message.startswith("This model's maximum context length is ")
    assert message.endswith(": 5,000 tokens exceed 4,096; shorten the prompt")


def test_bodies_have_the_official_form() -> None:
    body = openai_body(api_error(InvalidField("n", "expected an integer", code="invalid_type")))
    assert body == {
        "error": {
            "message": "n: expected an integer",
            "type": "invalid_request_error",
            "param": "n",
            "code": "invalid_type",
        }
    }


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("response_format.json_schema.schema: /not: not supported", "response_format.json_schema.schema"),
        ("guided_regex: cannot be enforced: no", "guided_regex"),
        ("tools: cannot be enforced: no", "tools"),
        ("tools and a response format cannot be combined", None),
        ("tool look: cannot be enforced: no", None),
        ("empty prompt: at least one token is needed", None),
    ],
)
def test_errors_about_formats_name_their_field(message: str, param: str | None) -> None:
    assert api_error(UsageError(message)).param == param


@pytest.mark.parametrize(
    ("wait_s", "seconds", "milliseconds"),
    [
        (0.2, "1", "200"),
        (2.001, "3", "2001"),
        (1e9, "120", "120000"),
        (0.0, "1", "1"),
        (-5.0, "1", "1"),
        (math.inf, "120", "120000"),
        (math.nan, "120", "120000"),
    ],
)
def test_overload_says_when_to_retry(wait_s: float, seconds: str, milliseconds: str) -> None:
    """OpenAI's clients do not retry at all if the wait is longer than 120 s."""
    headers = api_error(Overloaded("the queue is full", retry_after=wait_s)).headers
    assert headers == {"retry-after": seconds, "retry-after-ms": milliseconds, "x-should-retry": "true"}


def test_unavailability_says_when_to_retry() -> None:
    assert api_error(Unavailable("", state="loading", retry_after=7.0)).headers["retry-after"] == "7"
    assert api_error(Unavailable("", state="failed")).headers == {"x-should-retry": "false"}
