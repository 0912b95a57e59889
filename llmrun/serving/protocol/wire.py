"""The wire formats of APIs: encodes JSON, frames the chunks of streams, and reports errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from llmrun.serving.protocol.errors import ApiError, llama_server_body, openai_body

EVENT_STREAM: Final = "text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True)
class WireFormat:
    """The format of an API's streams and errors.

    media_type   the content type of streams
    frame        encodes a chunk of a stream; the second argument is the event's ID, or "" for events without an ID
    ping         returns bytes that clients ignore, for silent streams; the argument is a comment for people
    end          the last bytes of a successful stream
    error        returns the body of an error response
    error_chunk  returns the last chunk of a failed stream
    """

    media_type: str
    frame: Callable[[Mapping[str, Any], str], bytes]
    ping: Callable[[str], bytes]
    end: bytes
    error: Callable[[ApiError], Mapping[str, Any]]
    error_chunk: Callable[[ApiError], Mapping[str, Any]]


def json_bytes(value: Any) -> bytes:
    """Encode JSON for a response. Unpaired surrogates, which file names can contain, become question marks."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def parsed_object(text: str) -> dict[str, Any] | None:
    """Return the object in a JSON text, or None if the text is incomplete, invalid or not an object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError):
        return None


def data_event(chunk: Mapping[str, Any], event_id: str) -> bytes:
    """Return a server-sent event without a type."""
    id_line = b"id: " + event_id.encode("ascii") + b"\n" if event_id else b""
    return id_line + b"data: " + json_bytes(chunk) + b"\n\n"


def typed_event(chunk: Mapping[str, Any], event_id: str) -> bytes:
    """Return a server-sent event with the chunk's field `type` as the event type."""
    kind = str(chunk["type"]).encode("ascii")
    return b"event: " + kind + b"\n" + data_event(chunk, event_id)


def json_line(chunk: Mapping[str, Any], event_id: str) -> bytes:
    """Return a chunk as a line of JSON. The event ID is ignored, because JSON lines have no IDs."""
    return json_bytes(chunk) + b"\n"


def comment(words: str) -> bytes:
    """Return a comment, which clients of server-sent events ignore."""
    return b": " + words.encode("ascii") + b"\n\n"


OPENAI: Final = WireFormat(EVENT_STREAM, data_event, comment, b"data: [DONE]\n\n", openai_body, openai_body)
# The format of llama-server's own routes. Streams have no end marker.
LLAMA_SERVER: Final = WireFormat(EVENT_STREAM, data_event, comment, b"", llama_server_body, llama_server_body)
