"""Tests of frames and of the codecs of their contents."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from llmrun.base.errors import DoesNotFit, KVFull, LlmrunError, Overloaded, Unavailable, UsageError
from llmrun.base.processes.frames import (
    BadMessage,
    Codec,
    FrameTooLong,
    decoded,
    encoded,
    error_from_json,
    error_to_json,
    frame_length,
    read_frame,
    write_frame,
)

LONGEST = 1 << 20


def test_frames_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "frames"
    values = [{}, ["é\ud800", 2**70], "x" * 100_000]
    with path.open("wb") as stream:
        for value in values:
            write_frame(stream, encoded(value))
    with path.open("rb") as stream:
        assert [decoded(read_frame(stream, LONGEST) or b"") for _ in values] == values
        assert read_frame(stream, LONGEST) is None
    with path.open("rb") as stream:
        assert read_frame(stream, 2) == b"{}"
        with pytest.raises(FrameTooLong):
            read_frame(stream, 10)
    path.write_bytes(path.read_bytes()[:-1])
    with path.open("rb") as stream:
        assert [read_frame(stream, LONGEST) is None for _ in values] == [False, False, True]


@pytest.mark.parametrize("length", [101, 1 << 30, 1 << 62, 2**64 - 1])
def test_a_header_is_refused_before_anything_is_read(length: int) -> None:
    header = length.to_bytes(8, "big")
    with pytest.raises(FrameTooLong, match=f"{length:,} bytes; the limit is 100"):
        frame_length(header, 100)
    with pytest.raises(FrameTooLong):
        read_frame(io.BytesIO(header), 100)


def test_only_bytes_that_arrive_take_memory() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as source:
        os.write(writing, (1 << 50).to_bytes(8, "big") + b"abc")
        os.close(writing)
        assert read_frame(source, 1 << 62) is None


class Trickle(io.RawIOBase):
    """A stream whose reads and writes accept a few bytes at a time, as pipes may."""

    def __init__(self) -> None:
        self.data = b""

    def read(self, size: int = -1) -> bytes:
        piece, self.data = self.data[: min(size, 5)], self.data[min(size, 5) :]
        return piece

    def write(self, data: Any) -> int:
        self.data += bytes(data[:5])
        return len(data[:5])


def test_frames_arrive_whole_over_a_stream_that_splits_them() -> None:
    contents = [b"", b"a", b"0123456789" * 3, b"\n" * 8, b"b"]
    stream = Trickle()
    for content in contents:
        write_frame(stream, content)
    assert [read_frame(stream, 30) for _ in contents] == contents
    write_frame(stream, b"half of it")
    stream.data = stream.data[:-1]
    assert read_frame(stream, 30) is None


# --- codecs


@dataclass(frozen=True, slots=True)
class Inner:
    numbers: tuple[float, ...] = ()
    names: frozenset[str] = frozenset()
    scales: Mapping[int, float] | None = None


class Ask(msgspec.Struct, tag=True, frozen=True):
    id: int
    text: str = ""
    data: bytes = b""
    inner: Inner = Inner()
    anything: Any = None


class Failed(msgspec.Struct, tag=True, frozen=True):
    error: LlmrunError


Message = Ask | Failed
CODEC: Codec[Message] = Codec(Message)
ASKED = [
    Ask(1),
    Ask(
        -(2**63),
        "é🙂\x00\u2028",
        bytes(range(256)),
        Inner((1.5, math.inf), frozenset("ab"), {3: 0.5}),
        {"a": [1, None]},
    ),
    Ask(2, "\ud83d \udcff", bytes(range(256)), Inner((1e300,), frozenset("a\udfff"), {-7: 0.1}), ["\ud800"]),
    Ask(3, anything={"n": 2**70}),
]


@pytest.mark.parametrize("message", ASKED)
def test_messages_survive_the_way(message: Message) -> None:
    assert CODEC.decode(CODEC.encode(message)) == message


def test_values_that_are_no_numbers_survive_the_way() -> None:
    for text in ("", "\ud800"):  # as MessagePack and as JSON
        found = CODEC.decode(CODEC.encode(Ask(1, text, inner=Inner((math.nan,)))))
        assert isinstance(found, Ask)
        assert math.isnan(found.inner.numbers[0])


@pytest.mark.parametrize(
    "error",
    [
        LlmrunError("a", hint="b"),
        UsageError("a\ud800"),
        Overloaded("a", retry_after=2.5),
        Unavailable("a", state="restarting", retry_after=0.5),
        DoesNotFit("a", most_weights=7),
        KVFull("a"),
    ],
)
def test_errors_survive_the_way(error: LlmrunError) -> None:
    found = CODEC.decode(CODEC.encode(Failed(error)))
    assert isinstance(found, Failed)
    assert type(found.error) is type(error)
    assert (str(found.error), vars(found.error)) == (str(error), vars(error))


def test_unknown_errors_become_known_ones() -> None:
    class Special(UsageError):
        pass

    assert type(error_from_json(error_to_json(Special("a")))) is UsageError
    assert type(error_from_json({"error": "warnings", "message": "a"})) is LlmrunError
    assert type(error_from_json({"error": "Special", "message": "a"})) is LlmrunError
    with pytest.raises(BadMessage):
        error_from_json(["a"])


GARBAGE = {
    "nothing": b"",
    "noise": bytes(range(255, 0, -1)),
    "zeros": bytes(100),
    "half": CODEC.encode(ASKED[1])[:-1],
    "too much": CODEC.encode(ASKED[0]) + b"\x00",
    "another type": Codec[Any](Any).encode({"type": "Other", "id": 1}),
    "no type": Codec[Any](Any).encode({"id": 1}),
    "wrong field": Codec[Any](Any).encode({"type": "Ask", "id": "1"}),
    "missing field": Codec[Any](Any).encode({"type": "Ask"}),
    "no error": Codec[Any](Any).encode({"type": "Failed", "error": 1}),
    "too deep": b"\x91" * 100_000,
    "huge list": b"\xdd\xff\xff\xff\xff",
    "huge map": b"\xdf\xff\xff\xff\xff",
    "huge bytes": b"\xc6\xff\xff\xff\xff",
    "no text": b"\xa1\xff",
    "no JSON": b"\xc1{",
    "JSON too deep": b"\xc1" + b"[" * 100_000,
    "JSON that is no UTF-8": b"\xc1\xff",
    "wrong JSON": b'\xc1{"type": "Ask", "id": "x"}',
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_refused(name: str) -> None:
    with pytest.raises(BadMessage):
        CODEC.decode(GARBAGE[name])


def test_messages_for_which_there_is_no_memory_are_refused() -> None:
    """Some systems refuse to allocate the list of 4 billion above, and others do not notice."""
    codec: Codec[Message] = Codec(Message)
    codec._decoder = mock.Mock(**{"decode.side_effect": MemoryError})
    with pytest.raises(BadMessage, match="MemoryError"):
        codec.decode(b"")


@pytest.mark.parametrize("value", [object(), {1: object()}, Ask])
def test_values_that_no_message_may_contain_are_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        CODEC.encode(Ask(1, anything=value))
