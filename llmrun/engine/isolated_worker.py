"""The main loop of an isolated process, and the format of its messages: JSON with an 8-byte length prefix.

The process reads requests from stdin and writes answers to stdout. When the process is ready, it sends an empty frame.
A request consists of two frames: the limits, {"cpu_s", "memory"}, and then the request itself. The answer to every
request is one frame, [kind, value].
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable
from struct import Struct
from time import process_time
from typing import IO, Any

_LENGTH = Struct(">Q")
HEADER_BYTES = _LENGTH.size
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class FrameTooLong(Exception):
    """Raised for a frame that is longer than the reader accepts."""


def encoded(value: object) -> bytes:
    """Encode a value as JSON. Raises TypeError, ValueError or RecursionError if JSON cannot represent the value."""
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
    """Return the next frame, or None at the end of the stream. Raises FrameTooLong for more than `longest` bytes."""
    header = stream.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    length = frame_length(header)
    if longest is not None and length > longest:
        raise FrameTooLong
    data = stream.read(length)
    return data if len(data) == length else None


def serve(answer: Callable[[Any], tuple[str, Any]]) -> None:
    """Answer requests until stdin closes. `answer` returns the kind and the value of the answer to a request.

    If `answer` runs out of memory or recurses too deeply, the kind is "over", and the value is "memory" or "depth".
    """
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    write_frame(answers, b"")  # reports to the parent that this process is ready
    while (limits := read_frame(requests)) is not None:
        _limit(**decoded(limits))
        if (request := read_frame(requests)) is not None:
            write_frame(answers, _answered(answer, request))


def _answered(answer: Callable[[Any], tuple[str, Any]], request: bytes) -> bytes:
    try:
        return encoded(answer(decoded(request)))
    except MemoryError:
        return encoded(("over", "memory"))
    except RecursionError:
        return encoded(("over", "depth"))


def _limit(cpu_s: float, memory: int) -> None:
    """Set operating-system limits, where available, because the parent checks only at intervals."""
    if sys.platform == "win32":
        return  # the parent's watchdog is the only limit
    import resource

    # The extra second lets the parent act first, because the parent's error message is better.
    enough = math.ceil(process_time() + cpu_s) + 1
    for what, soft, hard in (
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_CPU, enough, resource.getrlimit(resource.RLIMIT_CPU)[1]),
        (resource.RLIMIT_FSIZE, 0, 0),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        with contextlib.suppress(OSError, ValueError):  # unsupported on macOS, or the limit is already lower
            resource.setrlimit(what, (soft, hard))
