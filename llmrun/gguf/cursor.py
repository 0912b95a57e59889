"""Walking through the bytes of a header, never past their end."""

from __future__ import annotations

import struct
from array import array
from pathlib import Path

import numpy as np

from llmrun.errors import BadGGUF
from llmrun.gguf.format import MAX_ARRAY_ELEMENTS
from llmrun.gguf.problems import bad_gguf
from llmrun.gguf.source import Source
from llmrun.gguf.values import NumberArray, NumberType, StringArray

# Everything before the tensors. 262,144 tokens with scores, types and 514,906 merges (Gemma 4) are 16 MB. At this
# limit a header of nothing but empty strings, the worst there is, takes 2.3 s and 0.4 GB.
MAX_HEADER_BYTES = 128 * 2**20

# A header's length is known when it has been parsed: it is read in steps of this size, as far as it goes.
_WINDOW_STEP = 2**20

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")


class Cursor:
    """A position in a header. Every method names what it reads (`what`), and raises BadGGUF when it is not all there.

    The header is in memory of its own, as far as it was read; what is returned are views of that, read-only.
    """

    def __init__(self, source: Source, path: Path, *, window: int = _WINDOW_STEP) -> None:
        """`window`: bytes of the first step; each further one is twice as large, at most _WINDOW_STEP."""
        self.path = path
        self.position = 0
        self.file_bytes = source.size
        self._source = source
        self._end = min(source.size, MAX_HEADER_BYTES)
        self._window = np.empty(self._end, np.uint8)  # takes no memory until something is read into it
        self._bytes = self._window.view()
        self._bytes.flags.writeable = False
        self._data = self._bytes.data[:0]  # what has been read
        self._step = window

    @property
    def remaining(self) -> int:
        return self._end - self.position

    def bad(self, where: str, seen: str) -> BadGGUF:
        return bad_gguf(self.path, where, seen)

    def u32(self, what: str) -> int:
        start = self._take(4, what)
        value: int = _U32.unpack_from(self._data, start)[0]
        return value

    def u64(self, what: str) -> int:
        start = self._take(8, what)
        value: int = _U64.unpack_from(self._data, start)[0]
        return value

    def i64(self, what: str) -> int:
        start = self._take(8, what)
        value: int = _I64.unpack_from(self._data, start)[0]
        return value

    def count(self, what: str, *, least_bytes: int, limit: int) -> int:
        """A u64 that says how many items of at least `least_bytes` bytes follow; refused before anything is read."""
        n = self.u64(what)
        if n > limit:
            raise self.bad(what, f"{n} seen, at most {limit} are read")
        if n * least_bytes > self.remaining:
            raise self.bad(what, f"{n} seen, {self._room(n * least_bytes)}")
        return n

    def text(self, what: str) -> bytes:
        """A string: its length as u64, then its bytes."""
        length = self.u64(what)
        start = self._take(length, what)
        return self._data[start : start + length].tobytes()

    def start(self, n: int) -> bytes:
        """The first n bytes of the file, or all it has."""
        self._fill(min(n, self._end))
        return self._data[:n].tobytes()

    def number(self, type_: NumberType, what: str) -> bool | int | float:
        start = self._take(type_.layout.size, what)
        value: bool | int | float = type_.layout.unpack_from(self._data, start)[0]
        if type_.name != "bool":
            return value
        if value not in (0, 1):
            raise self.bad(what, f"a boolean of {value}, must be 0 or 1")
        return bool(value)

    def number_array(self, type_: NumberType, what: str) -> NumberArray:
        """A view of the header."""
        n = self.count(what, least_bytes=type_.layout.size, limit=MAX_ARRAY_ELEMENTS)
        start = self._take(n * type_.layout.size, what)
        raw = self._bytes[start : self.position]
        if type_.dtype.kind == "b" and raw.size and int(raw.max()) > 1:
            index = int(np.argmax(raw > 1))
            raise self.bad(what, f"a boolean of {raw[index]} at index {index}, must be 0 or 1")
        return raw.view(type_.dtype)

    def string_array(self, what: str) -> StringArray:
        """Where the strings are; none is decoded. This loop is the cost of a header: 80 ns a string."""
        n = self.count(what, least_bytes=8, limit=MAX_ARRAY_ELEMENTS)
        length_at, position = _U64.unpack_from, self.position
        begins = array("q", [position])
        add = begins.append
        while len(begins) <= n:
            data = self._data
            try:
                for _ in range(n + 1 - len(begins)):
                    position += 8 + length_at(data, position)[0]
                    add(position)
            except (struct.error, OverflowError):
                # The next length has not been read yet, or lies behind the end.
                if position + 8 > self._end:
                    raise self._string_too_long(begins, what) from None
                self._fill(position + 8)
        if position > self._end:
            raise self._string_too_long(begins, what)
        self._fill(position)
        # A string's bytes follow its length, and the next length follows them.
        bounds = np.frombuffer(begins, np.int64)
        self.position = position
        return StringArray(self._bytes, bounds[:-1] + 8, np.diff(bounds) - 8)

    def jump(self, position: int, n: int) -> memoryview:
        """Go on at `position`, with the next n bytes there, or as many as are left, which are returned. Nothing between
        what has been read and `position` is read any more."""
        self.position = position
        filled = len(self._data)
        if position > filled:
            self._data = self._bytes.data[: min(position, self._end)]
            self._step = n
        self._fill(min(position + n, self._end))
        return self._data[position : position + n]

    def align(self, alignment: int) -> None:
        self.position = -(-self.position // alignment) * alignment

    def _string_too_long(self, begins: array[int], what: str) -> BadGGUF:
        """The last string begun does not fit; a begin behind the end belongs to no string."""
        index = len(begins) - (2 if begins[-1] > self._end else 1)
        self.position = begins[index]
        needed = 8 if self.remaining < 8 else self.u64(what)
        return self.bad(f"{what}: string {index}", self._room(needed))

    def _take(self, n: int, what: str) -> int:
        start = self.position
        if n > self._end - start:
            raise self.bad(what, self._room(n))
        self.position = start + n
        self._fill(self.position)
        return start

    def _fill(self, end: int) -> None:
        """Read so far that `end` bytes are in memory, and a step further than before."""
        filled = len(self._data)
        if end <= filled:
            return
        reached = min(self._end, max(end, filled + min(self._step, _WINDOW_STEP)))
        self._step *= 2
        self._source.read(filled, self._window[filled:reached])
        self._data = self._bytes.data[:reached]

    def _room(self, needed: int) -> str:
        kind = "bytes" if self._end == self.file_bytes else f"bytes of the {MAX_HEADER_BYTES} a header may have"
        return f"{needed} bytes needed, {self.remaining} {kind} remain"
