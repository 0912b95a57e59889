"""Walking through the bytes of a header, never past their end."""

from __future__ import annotations

import mmap
import struct
from array import array
from pathlib import Path

import numpy as np

from llmrun.errors import BadGGUF
from llmrun.gguf.problems import bad_gguf
from llmrun.gguf.values import NumberArray, NumberType, StringArray

Buffer = bytes | mmap.mmap

# Everything before the tensors. 262,144 tokens with scores, types and 514,906 merges (Gemma 4) are 16 MB. At this
# limit a header of nothing but empty strings, the worst there is, takes 2.3 s and 0.4 GB.
MAX_HEADER_BYTES = 128 * 2**20
MAX_ARRAY_ELEMENTS = 2**30  # llama.cpp's GGUF_MAX_ARRAY_ELEMENTS

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")


class Cursor:
    """A position in a file. Every method names what it reads (`what`), and raises BadGGUF when it is not all there."""

    def __init__(self, data: Buffer, path: Path) -> None:
        self.path = path
        self.position = 0
        self.bytes = np.frombuffer(data, np.uint8)
        self._data = data
        self._end = min(len(data), MAX_HEADER_BYTES)

    @property
    def remaining(self) -> int:
        return self._end - self.position

    def bad(self, where: str, seen: str) -> BadGGUF:
        return bad_gguf(self.path, where, seen)

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self._data, self._take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self._data, self._take(8, what))[0]
        return value

    def i64(self, what: str) -> int:
        value: int = _I64.unpack_from(self._data, self._take(8, what))[0]
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
        return self._data[start : start + length]

    def number(self, type_: NumberType, what: str) -> bool | int | float:
        value: bool | int | float = type_.layout.unpack_from(self._data, self._take(type_.layout.size, what))[0]
        if type_.name != "bool":
            return value
        if value not in (0, 1):
            raise self.bad(what, f"a boolean of {value}, must be 0 or 1")
        return bool(value)

    def number_array(self, type_: NumberType, what: str) -> NumberArray:
        """A view of the file."""
        n = self.count(what, least_bytes=type_.layout.size, limit=MAX_ARRAY_ELEMENTS)
        start = self._take(n * type_.layout.size, what)
        raw = self.bytes[start : self.position]
        if type_.dtype.kind == "b" and raw.size and int(raw.max()) > 1:
            index = int(np.argmax(raw > 1))
            raise self.bad(what, f"a boolean of {raw[index]} at index {index}, must be 0 or 1")
        return raw.view(type_.dtype)

    def string_array(self, what: str) -> StringArray:
        """Where the strings are; none is decoded. This loop is the cost of a header: 80 ns a string."""
        n = self.count(what, least_bytes=8, limit=MAX_ARRAY_ELEMENTS)
        data, length_at, position = self._data, _U64.unpack_from, self.position
        begins = array("q", [position])
        add = begins.append
        try:
            for _ in range(n):
                position += 8 + length_at(data, position)[0]
                add(position)
        except (struct.error, OverflowError):
            # The string before pointed past the end of the file: no length can be read there.
            position = len(data) + 1
            add(position)
        if position > self._end:
            self._refuse_string(begins, what)
        # A string's bytes follow its length, and the next length follows them.
        bounds = np.frombuffer(begins, np.int64)
        self.position = position
        return StringArray(self.bytes, bounds[:-1] + 8, np.diff(bounds) - 8)

    def align(self, alignment: int) -> None:
        self.position = -(-self.position // alignment) * alignment

    def _refuse_string(self, begins: array[int], what: str) -> None:
        """Name the first string that does not fit."""
        index = next(i for i, begin in enumerate(begins[1:]) if begin > self._end)
        self.position = begins[index]
        self.text(f"{what}: string {index}")

    def _take(self, n: int, what: str) -> int:
        start = self.position
        if n > self._end - start:
            raise self.bad(what, self._room(n))
        self.position = start + n
        return start

    def _room(self, needed: int) -> str:
        kind = "bytes" if self._end == len(self._data) else f"bytes of the {MAX_HEADER_BYTES} a header may have"
        return f"{needed} bytes needed, {self.remaining} {kind} remain"
