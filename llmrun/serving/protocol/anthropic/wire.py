"""The form of Anthropic's API: its streams and its errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from llmrun.serving.protocol.errors import ApiError
from llmrun.serving.protocol.wire import EVENT_STREAM, WireFormat, typed_event

_INVALID: Final = "invalid_request_error"  # the type of all other client errors, too
# Anthropic's status for overload is 529. Ours is 503, which proxies and monitoring know, and its clients retry both.
_KINDS: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# The runner of tools in Anthropic's client asks the server to keep the conversation. After an error with this code, it
# sends the whole conversation itself.
_NO_THREADS: Final = {"error_code": "thread_unsupported_request"}
_PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
# The end of the message of ContextExceeded.by_prompt
_TOO_LONG: Final = re.compile(r"([\d,]+) tokens plus one for the answer exceed the limit of ([\d,]+)(.*)")


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """Return the body of an error, which is also the last event of a stream that failed."""
    kind = _KINDS.get(error.status, _INVALID if error.status < 500 else "api_error")
    details = {"details": _NO_THREADS} if error.param == "thread" else {}
    return {"type": "error", "error": {"type": kind, "message": _message(error), **details}}


def _message(error: ApiError) -> str:
    """Return the message of an error. For a prompt that is too long, it has Anthropic's form.

    Claude Code recognizes this form, reads the two numbers, and then shortens the conversation.
    """
    found = _TOO_LONG.search(error.message) if error.code == "context_length_exceeded" else None
    if found is None:
        return error.message
    tokens, limit = (number.replace(",", "") for number in found.groups()[:2])
    return f"prompt is too long: {tokens} tokens > {limit} maximum{found[3]}"


ANTHROPIC: Final = WireFormat(EVENT_STREAM, typed_event, _PING, b"", anthropic_body, anthropic_body)
