"""How the process that renders templates and the one that watches it talk: JSON, after its length in eight bytes."""

from __future__ import annotations

import json
from struct import Struct
from typing import IO, Any

_LENGTH = Struct(">Q")


class FrameTooLong(Exception):  # named for what happened, as the errors of this project are
    """The other side announces more bytes than are wanted of it."""


def encoded(value: object) -> bytes:
    """The bytes of a value. Raises TypeError, ValueError or RecursionError for what JSON cannot say."""
    # A text of the user may hold half a surrogate pair.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def decoded(data: bytes) -> Any:
    """The value of some bytes. Raises ValueError or RecursionError."""
    return json.loads(data.decode("utf-8", "surrogatepass"))


def write_frame(stream: IO[bytes], data: bytes) -> None:
    """Raises OSError when nobody reads any more."""
    stream.write(_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def read_frame(stream: IO[bytes], longest: int | None = None) -> bytes | None:
    """The next frame; None when the other side has ended. Raises FrameTooLong."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    if longest is not None and length > longest:
        raise FrameTooLong
    data = stream.read(length)
    return data if len(data) == length else None
