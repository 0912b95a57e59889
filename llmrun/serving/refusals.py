"""Errors of the HTTP layer itself, and the responses for all errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from llmrun.base.amounts import counted
from llmrun.base.errors import LlmrunError
from llmrun.engine.requests import SeenImage
from llmrun.serving.protocol.errors import ApiError, api_error
from llmrun.serving.protocol.parsed import ignored_names
from llmrun.serving.protocol.wire import WireFormat, json_bytes

INVALID = "invalid_request_error"
SERVER = "server_error"


class Refused(LlmrunError):
    """A request that the HTTP layer refuses before any model is involved. `status` is the HTTP status."""

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
    """Return the error that the client receives. Bugs are reported as status 500 without details."""
    return error.error if isinstance(error, Refused) else api_error(error)


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with a JSON value. If `value` is bytes, they must already be JSON."""
    return Response(
        value if isinstance(value, bytes) else json_bytes(value),
        status_code=status,
        headers={"cache-control": "no-store", **(headers or {})},
        media_type="application/json",
    )


def json_bytes_in_parts(body: Mapping[str, Any] | Sequence[Any]) -> bytes:
    """Encode an answer like `json_bytes`, without blocking other threads for long.

    Python's JSON encoder blocks all other threads while it runs. Encoding 128 choices in one call, with 20
    log-probabilities per token, took a second, and 2,048 vectors took 4 s. Therefore each item of a list is encoded
    separately if the body is a list or the list is a field of the body.
    """
    if not isinstance(body, Mapping):
        return _list_bytes(body)
    fields = []
    for name, value in body.items():
        content = _list_bytes(value) if isinstance(value, list) else json_bytes(value)
        fields.append(json_bytes(name) + b":" + content)
    return b"{" + b",".join(fields) + b"}"


def _list_bytes(items: Sequence[Any]) -> bytes:
    return b"[" + b",".join(map(json_bytes, items)) + b"]"


def ignored_header(ignored: Sequence[str]) -> Mapping[str, str]:
    """Return the header that names the ignored fields of a request, so that no field is ignored silently."""
    return {"x-llmrun-ignored": ignored_names(ignored)} if ignored else {}


def context_header(context: int) -> Mapping[str, str]:
    """Return the header with the size of the context in tokens, or no header if `context` is 0."""
    return {"x-llmrun-context": str(context)} if context else {}


def image_words(images: Iterable[SeenImage]) -> str:
    """Describe how the model sees images, as in "4032x3024 shrunk to 896x896, 256 tokens; 32x32, 1 token"."""
    return "; ".join(map(_image_words, images))


def _image_words(image: SeenImage) -> str:
    is_shrunk = image.seen_width < image.width or image.seen_height < image.height
    shrunk = f" shrunk to {image.seen_width}x{image.seen_height}" if is_shrunk else ""
    frame = ", first frame" if image.is_first_frame else ""
    return f"{image.width}x{image.height}{shrunk}{frame}, {counted(image.tokens, 'token')}"


def images_header(images: Sequence[SeenImage]) -> Mapping[str, str]:
    """Return the header that says how the model sees the images, so that no image is shrunk silently."""
    return {"x-llmrun-images": image_words(images)} if images else {}


def error_response(error: BaseException, wire: WireFormat) -> Response:
    """Return the response for an error, in the wire format of an API."""
    told = as_api_error(error)
    return json_response(wire.error(told), status=told.status, headers=told.headers)
