"""Frames, which are the messages between a parent and its child processes, and the codecs of their contents.

A frame is the length of the data, in 8 bytes, followed by the data. Every reader limits the length, and allocates
memory only for bytes that have arrived, so a corrupt length cannot exhaust the memory.

`Codec` converts messages of known types to MessagePack and back. `encoded` and `decoded` convert plain values to JSON
and back, without importing msgspec, which takes 20 ms.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from struct import Struct
from typing import IO, Any, Generic, TypeVar

from llmrun.base import errors
from llmrun.base.errors import LlmrunError

_LENGTH = Struct(">Q")
HEADER_BYTES = _LENGTH.size
_PIECE_BYTES = 1 << 20  # the largest single read
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_ERROR_FIELDS = ("retry_after", "state", "most_weights")
_AS_JSON = b"\xc1"  # the first byte of a message in JSON; MessagePack never uses this byte

T = TypeVar("T")


class FrameTooLong(Exception):
    """Raised for a frame that is longer than the reader accepts."""


class BadMessage(Exception):
    """Raised for a message that does not have the form that this version of llmrun sends."""


def framed(data: bytes) -> bytes:
    """Return a frame: the length of the data, followed by the data."""
    return _LENGTH.pack(len(data)) + data


def frame_length(header: bytes, longest: int) -> int:
    """Return the length of the data that follows a header of HEADER_BYTES. Raises FrameTooLong."""
    length: int = _LENGTH.unpack_from(header)[0]
    if length > longest:
        raise FrameTooLong(f"a message of {length:,} bytes; the limit is {longest:,}")
    return length


def write_all(stream: io.RawIOBase | IO[bytes], data: bytes) -> None:
    """Write to a stream, which may accept only part of the data at a time. Raises OSError if the pipe is closed."""
    rest = memoryview(data)
    while rest:
        rest = rest[stream.write(rest) or 0 :]


def write_frame(stream: io.RawIOBase | IO[bytes], data: bytes) -> None:
    """Write one frame. Raises OSError if the other process has closed its end of the pipe."""
    write_all(stream, framed(data))
    stream.flush()


def read_frame(stream: io.RawIOBase | IO[bytes], longest: int) -> bytes | None:
    """Return the next frame, or None if the stream ends before a whole frame. Raises FrameTooLong and OSError."""
    header = _read_exactly(stream, HEADER_BYTES)
    return None if header is None else _read_exactly(stream, frame_length(header, longest))


def _read_exactly(stream: io.RawIOBase | IO[bytes], size: int) -> bytes | None:
    """Return the next `size` bytes, or None if the stream ends before them."""
    pieces = []
    while size:
        piece = stream.read(min(size, _PIECE_BYTES))
        if not piece:
            return None
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def encoded(value: object) -> bytes:
    """Encode a value as JSON. Raises TypeError, ValueError or RecursionError if JSON cannot represent the value."""
    # The user's text may contain unpaired surrogates.
    return _JSON.encode(value).encode("utf-8", "surrogatepass")


def decoded(data: bytes) -> Any:
    """Decode JSON. Raises ValueError or RecursionError."""
    return json.loads(data.decode("utf-8", "surrogatepass"))


class Codec(Generic[T]):
    """Converts messages of one type to bytes and back.

    The type may be a dataclass, a msgspec.Struct, a union of tagged Structs, or any combination that msgspec supports.
    Messages may contain LlmrunErrors. Decoding is strict, because the two processes run the same code.

    MessagePack cannot represent unpaired surrogates or integers beyond 64 bits. Messages with such values are sent as
    JSON, in which bytes in fields of type Any become Base64 text.
    """

    def __init__(self, kind: Any) -> None:
        from msgspec import msgpack

        self._kind = kind
        self._encoder = msgpack.Encoder(enc_hook=_to_plain)
        self._decoder: Any = msgpack.Decoder(kind, dec_hook=_from_plain)

    def encode(self, message: T) -> bytes:
        """Encode a message. Raises TypeError, ValueError or RecursionError for values that no message may contain."""
        try:
            return self._encoder.encode(message)
        except (UnicodeEncodeError, OverflowError):
            from msgspec import to_builtins

            return _AS_JSON + encoded(to_builtins(message, str_keys=True, enc_hook=_to_plain))

    def decode(self, data: bytes) -> T:
        """Decode a message. Raises BadMessage."""
        try:
            if not data.startswith(_AS_JSON):
                message: T = self._decoder.decode(data)
                return message
            from msgspec import convert

            found: T = convert(decoded(data[1:]), self._kind, str_keys=True, dec_hook=_from_plain)
            return found
        except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
            raise BadMessage(f"{type(error).__name__}: {error}") from error


def error_to_json(error: LlmrunError) -> dict[str, Any]:
    """Convert an error. Classes outside llmrun.base.errors are sent as the nearest base class in that module."""
    known = next(kind for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
    details = {name: getattr(error, name) for name in _ERROR_FIELDS if hasattr(error, name)}
    return {"error": known.__name__, "message": str(error), "hint": error.hint, **details}


def error_from_json(value: Any) -> LlmrunError:
    """Convert JSON back to an error. Unknown classes become LlmrunError. Raises BadMessage."""
    if not isinstance(value, dict):
        raise BadMessage(f"{value!r:.100} is not an error")
    kind = getattr(errors, str(value.get("error")), None)
    if not (isinstance(kind, type) and issubclass(kind, LlmrunError)):
        kind = LlmrunError
    error = kind(str(value.get("message")), hint=str(value.get("hint", "")))
    for name in _ERROR_FIELDS:
        if name in value and hasattr(error, name):
            setattr(error, name, value[name])
    return error


def _to_plain(value: Any) -> Any:
    if isinstance(value, LlmrunError):
        return error_to_json(value)
    if isinstance(value, Mapping):
        return dict(value)
    for kind in (float, int, str):  # msgspec refuses subclasses, such as numpy.float64
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"no message may contain {type(value).__name__}")


def _from_plain(kind: type, value: Any) -> Any:
    if issubclass(kind, LlmrunError):
        return error_from_json(value)
    raise TypeError(f"no message may contain {kind.__name__}")
