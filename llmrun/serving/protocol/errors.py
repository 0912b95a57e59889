"""Converts errors to HTTP responses, and parses JSON bodies that may be hostile."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from llmrun.base.errors import (
    BackendCrashed,
    ContextExceeded,
    DoesNotFit,
    InvalidAnswer,
    LlmrunError,
    ModelFileError,
    ModelNotFound,
    Overloaded,
    TemplateRefused,
    Unavailable,
    UsageError,
    shown,
)
from llmrun.base.folders import UTF_16
from llmrun.engine.constraint.strict_json import parse_unique

_INVALID: Final = "invalid_request_error"
_SERVER: Final = "server_error"
# Many programs, such as LiteLLM, recognize this error by OpenAI's message and not by the error's code.
_TOO_LONG: Final = "This model's maximum context length is exceeded"
_LONGEST_WAIT_S: Final = 120  # OpenAI's clients do not retry at all if the server asks for a longer wait
# The field names at the beginning of the engine's messages about formats and tools.
_ORIGINS: Final = ("response_format", "json_schema", "grammar", "structured_outputs", "text", "tools")
_ORIGIN_PREFIX: Final = "guided_"

# The messages about the server's own problems are fixed, because the original messages may name files of the server.
_OWN_PROBLEMS: Final[tuple[tuple[type[LlmrunError], str, str], ...]] = (
    (BackendCrashed, "backend_crashed", "the model's process crashed while it worked on this request"),
    (DoesNotFit, "out_of_memory", "the server ran out of memory"),
    (ModelFileError, "model_failed", "the model could not process this request"),
)
_STATES: Final = {
    "loading": "the model is loading",
    "restarting": "the model's process is restarting",
    "draining": "the server is shutting down",
    "failed": "the model could not be opened",
}
_LLAMA_SERVER_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    503: "unavailable_error",
}
_NO_TEMPLATE: Final = "no chat template:"  # the beginning of a message that also contains the file's path


class InvalidField(UsageError):
    """A field of a request is invalid or not supported.

    param  the field's name, such as "messages[0].content"; None if the body as a whole is invalid
    code   OpenAI's code for the kind of problem
    """

    def __init__(self, param: str | None, problem: str, *, code: str = "invalid_value", hint: str = "") -> None:
        super().__init__(f"{param}: {problem}" if param else problem, hint=hint)
        self.param = param
        self.code = code


def unsupported(param: str, problem: str = "not supported", *, hint: str = "") -> InvalidField:
    """Return the error for a field that the server knows but does not support."""
    return InvalidField(param, problem, code="unsupported_parameter", hint=hint)


@dataclass(frozen=True, slots=True)
class ApiError:
    """An error as an HTTP response.

    type, code, param  the error's fields of the same names in OpenAI's API
    headers            the response headers, with names in lower case, such as retry-after
    """

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def api_error(error: BaseException) -> ApiError:
    """Convert an error to an HTTP response. Errors other than LlmrunError are bugs, whose details stay private."""
    if isinstance(error, InvalidField):
        return ApiError(400, _words(error), _INVALID, error.code, error.param)
    if isinstance(error, UsageError):
        return ApiError(400, _words(error), _INVALID, "invalid_value", _origin(str(error)))
    if isinstance(error, ContextExceeded):
        return ApiError(400, f"{_TOO_LONG}: {_words(error)}", _INVALID, "context_length_exceeded")
    if isinstance(error, TemplateRefused):
        return ApiError(400, _template_words(error), _INVALID, "template_refused")
    if isinstance(error, ModelNotFound):
        return ApiError(404, _words(error), _INVALID, "model_not_found", "model")
    if isinstance(error, InvalidAnswer):
        # Clients would retry after status 500, but the same seed produces the same answer.
        return ApiError(422, _words(error), _SERVER, "invalid_answer")
    if isinstance(error, Overloaded):
        headers = {**_retry_headers(error.retry_after), "x-should-retry": "true"}
        return ApiError(429, _words(error), "rate_limit_error", "server_overloaded", None, headers)
    if isinstance(error, Unavailable):
        return _unavailable(error)
    return _own_problem(error)


def openai_body(error: ApiError) -> dict[str, Any]:
    """Return the body of an error response in OpenAI's form, which is also the data of an error event."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def llama_server_body(error: ApiError) -> dict[str, Any]:
    """Return the body of an error response in llama-server's own form, where `code` is the HTTP status."""
    kind = _LLAMA_SERVER_TYPES.get(error.status, error.type)
    if error.code == "context_length_exceeded":
        kind = "exceed_context_size_error"
    return {"error": {"code": error.status, "message": error.message, "type": kind}}


def _unavailable(error: Unavailable) -> ApiError:
    words = _STATES.get(error.state, "the model is not available")
    headers = _retry_headers(error.retry_after)
    if error.state == "failed":
        headers = {"x-should-retry": "false"}
    return ApiError(503, words, _SERVER, error.state, None, headers)


def _own_problem(error: BaseException) -> ApiError:
    for kind, code, words in _OWN_PROBLEMS:
        if isinstance(error, kind):
            # OpenAI's clients retry status 500 twice, and each crash would use up one replay of all other requests.
            headers = {"x-should-retry": "false"} if kind is BackendCrashed else {}
            return ApiError(500, words, _SERVER, code, None, headers)
    known = isinstance(error, LlmrunError)
    return ApiError(500, "the server could not process this request" if known else "internal error", _SERVER)


def _words(error: LlmrunError) -> str:
    return f"{error}; {error.hint}" if error.hint else str(error)


def _template_words(error: TemplateRefused) -> str:
    if str(error).startswith(_NO_TEMPLATE):
        return "this model has no chat template; send a prompt to /v1/completions instead"
    return _words(error)


def _origin(message: str) -> str | None:
    """Return the field name at the beginning of the engine's message about a format or tool, or None."""
    place, colon, _ = message.partition(":")
    name = place.partition(".")[0]
    return place if colon and (name in _ORIGINS or name.startswith(_ORIGIN_PREFIX)) else None


def _retry_headers(wait_s: float) -> dict[str, str]:
    """Return the headers that ask clients to retry after a given time. OpenAI's clients prefer `retry-after-ms`."""
    wait_s = wait_s if math.isfinite(wait_s) else _LONGEST_WAIT_S
    wait_s = min(max(wait_s, 0.001), float(_LONGEST_WAIT_S))
    return {"retry-after": str(max(1, math.ceil(wait_s))), "retry-after-ms": str(math.ceil(wait_s * 1000))}


MOST_DEPTH: Final = 128  # levels; a request can contain a schema of 100 levels, which is the engine's limit
# Empty lists use 40 times as much memory as their text. No model's context could hold a text with this many commas.
_MOST_MARKS: Final = 2_000_000


def parse_json(data: bytes) -> dict[str, Any]:
    """Parse a body that must be a JSON object, in time proportional to the body's length.

    The result can be encoded as JSON again, because it contains no unpaired surrogates and no infinite numbers.
    Raises InvalidField if the body is not UTF-8, is not strict JSON, repeats a key in one object, is nested more than
    MOST_DEPTH levels deep, or has too many values. Parsing 16 MiB takes 1 s, so call this function in a thread.
    """
    if not data:
        raise InvalidField(None, "the request body is empty", hint="send a JSON object")
    if data.startswith(UTF_16) or b"\0" in data[:2]:
        raise InvalidField(None, "the request body is UTF-16 text", hint="send UTF-8")
    if sum(map(data.count, (b",", b"[", b"{"))) > _MOST_MARKS:
        raise InvalidField(None, f"the request body has more than {_MOST_MARKS:,} commas and brackets")
    try:
        value = parse_unique(data.removeprefix(codecs.BOM_UTF8).decode())
    except UnicodeDecodeError as error:
        raise InvalidField(None, f"the request body is not UTF-8 text: invalid byte at {error.start:,}") from None
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno:,}, column {error.colno:,}"
        raise InvalidField(None, f"the request body is not valid JSON: {error.msg}: {place}") from None
    except ValueError as error:
        raise InvalidField(None, f"the request body is not valid JSON: {shown(str(error), 200)}") from None
    if type(value) is not dict:
        raise InvalidField(None, "the request body is not a JSON object")
    _check(value)
    return value


def _check(value: dict[str, Any]) -> None:
    """Raise InvalidField if a value cannot be encoded as JSON again or is nested too deeply."""
    level: list[Any] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise _too_deep()
        deeper: list[Any] = []
        for container in level:
            is_object = type(container) is dict
            if is_object:
                for key in container:
                    _check_text(key)
            for item in container.values() if is_object else container:
                kind = type(item)
                if kind is dict or kind is list:
                    deeper.append(item)
                elif kind is str:
                    _check_text(item)
                elif kind is float and not math.isfinite(item):
                    raise InvalidField(None, "the request body has a number that is too large")
        level = deeper


def _check_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = shown(text[max(0, error.start - 20) : error.start + 1])
        raise InvalidField(None, f"the request body has an unpaired surrogate in a string: {around}") from None


def _too_deep() -> InvalidField:
    return InvalidField(None, f"the request body is nested more than {MOST_DEPTH} levels deep")
