"""How the process that renders templates and its parent talk: JSON, preceded by its length in eight bytes."""

from __future__ import annotations

import json
from struct import Struct
from typing import IO, Any

_LENGTH = Struct(">Q")


class FrameTooLong(Exception):  # named for what happened, as the errors of this project are
    """The other side announces a longer frame than the reader accepts."""


def encoded(value: object) -> bytes:
    """Encode a value. Raises TypeError, ValueError or RecursionError for what JSON cannot express."""
    # The user's text may contain half a surrogate pair.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def decoded(data: bytes) -> Any:
    """Decode a value. Raises ValueError or RecursionError."""
    return json.loads(data.decode("utf-8", "surrogatepass"))


def write_frame(stream: IO[bytes], data: bytes) -> None:
    """Write one frame. Raises OSError if the other side no longer reads."""
    stream.write(_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def read_frame(stream: IO[bytes], longest: int | None = None) -> bytes | None:
    """Return the next frame, or None if the other side has closed the stream. Raises FrameTooLong."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    if longest is not None and length > longest:
        raise FrameTooLong
    data = stream.read(length)
    return data if len(data) == length else None
