"""Walking through the bytes of a header, never past their end. Imports no NumPy."""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from pathlib import Path

from llmrun.errors import BadGGUF
from llmrun.gguf.format import ScalarType
from llmrun.gguf.problems import HeaderTooLong, bad_gguf
from llmrun.gguf.source import Source

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

    The header is in memory of its own, as far as it was read; views of that are read-only.

    header  all bytes that may be read; those that were not read yet are 0
    """

    def __init__(self, source: Source, path: Path, *, window: int = _WINDOW_STEP, limit: int | None = None) -> None:
        """Stand at the first byte of `source`.

        window  bytes of the first step; each further one is twice as large, at most _WINDOW_STEP
        limit   bytes that are read at most [default: MAX_HEADER_BYTES]; a header that needs more is HeaderTooLong
        """
        self.path = path
        self.position = 0
        self.file_bytes = source.size
        self._source = source
        self._end = min(source.size, MAX_HEADER_BYTES if limit is None else limit)
        self._window = _reserved(self._end)
        self.header = self._window.toreadonly()
        self._data = self.header[:0]  # what has been read
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
            raise self._too_short(what, n * least_bytes, f"{n} seen, ")
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

    def number(self, type_: ScalarType, what: str) -> bool | int | float:
        start = self._take(type_.layout.size, what)
        value: bool | int | float = type_.layout.unpack_from(self._data, start)[0]
        if type_.name != "bool":
            return value
        if value not in (0, 1):
            raise self.bad(what, f"a boolean of {value}, must be 0 or 1")
        return bool(value)

    def view(self, n: int, what: str) -> memoryview:
        """The next n bytes of the header."""
        start = self._take(n, what)
        return self._data[start : self.position]

    def strings(self, n: int, what: str) -> array[int]:
        """Go behind n strings. Returns int64[n + 1]: where each begins with its length, and where the last one ends.
        None is decoded. This loop is the cost of a header: 80 ns a string."""
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
        self.position = position
        return begins

    def skip_strings(self, n: int, what: str) -> None:
        """Go behind n strings without noting where they are: 60 ns a string."""
        length_at, position = _U64.unpack_from, self.position
        while n:
            data = self._data
            try:
                for n in range(n, 0, -1):  # noqa: B007, B020 (after an exception, n strings are left)
                    position += 8 + length_at(data, position)[0]
                n = 0
            except (struct.error, OverflowError):
                if position + 8 > self._end:
                    raise self._too_short(what, position + 8 - self.position) from None
                self._fill(position + 8)
        if position > self._end:
            raise self._too_short(what, position - self.position)
        self.position = position

    def jump(self, position: int, n: int) -> memoryview:
        """Go on at `position`, with the next n bytes there, or as many as are left, which are returned. Nothing between
        what has been read and `position` is read any more."""
        self.position = position
        filled = len(self._data)
        if position > filled:
            self._data = self.header[: min(position, self._end)]
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
        return self._too_short(f"{what}: string {index}", needed)

    def _take(self, n: int, what: str) -> int:
        start = self.position
        if n > self._end - start:
            raise self._too_short(what, n)
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
        self._data = self.header[:reached]

    def _too_short(self, what: str, needed: int, seen: str = "") -> BadGGUF:
        is_limited = self._end < self.file_bytes
        kind = HeaderTooLong if is_limited and self.position + needed <= self.file_bytes else BadGGUF
        unit = f"bytes of the {self._end} a header may have" if is_limited else "bytes"
        return bad_gguf(self.path, what, f"{seen}{needed} bytes needed, {self.remaining} {unit} remain", kind)


def _reserved(n: int) -> memoryview:
    """n bytes of 0 that take no memory until something is written to them."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}
    return memoryview(mmap.mmap(-1, max(n, 1), **private))[:n]
