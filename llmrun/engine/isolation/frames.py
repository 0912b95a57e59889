"""The message format between an isolated process and its parent: JSON with an 8-byte length prefix."""

from __future__ import annotations

import json
from struct import Struct
from typing import IO, Any

_LENGTH = Struct(">Q")
HEADER_BYTES = _LENGTH.size
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class FrameTooLong(Exception):
    """The next frame is longer than the reader accepts."""


def encoded(value: object) -> bytes:
    """Encode a value as JSON. Raises TypeError, ValueError or RecursionError if JSON cannot represent it."""
    # The user's text may contain unpaired surrogates.
    return _ENCODER.encode(value).encode("utf-8", "surrogatepass")


def decoded(data: bytes) -> Any:
    """Decode JSON. Raises ValueError or RecursionError."""
    return json.loads(data.decode("utf-8", "surrogatepass"))


def framed(data: bytes) -> bytes:
    """Return a frame: the length of the data, followed by the data."""
    return _LENGTH.pack(len(data)) + data


def frame_length(header: bytes) -> int:
    """Return the length of the data that follows a frame's header of HEADER_BYTES."""
    length: int = _LENGTH.unpack(header)[0]
    return length


def write_frame(stream: IO[bytes], data: bytes) -> None:
    """Write one frame. Raises OSError if the other process has closed its end of the pipe."""
    stream.write(framed(data))
    stream.flush()


def read_frame(stream: IO[bytes], longest: int | None = None) -> bytes | None:
    """Return the next frame, or None at the end of the stream. Raises FrameTooLong if it exceeds `longest` bytes."""
    header = stream.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    length = frame_length(header)
    if longest is not None and length > longest:
        raise FrameTooLong
    data = stream.read(length)
    return data if len(data) == length else None
