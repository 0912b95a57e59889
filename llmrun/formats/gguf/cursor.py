"""A bounds-checked cursor over the bytes of a header. This module does not import NumPy."""

from __future__ import annotations

import mmap
import struct
import sys
from array import array
from pathlib import Path

from llmrun.base.errors import BadGGUF
from llmrun.formats.gguf.format import HeaderTooLong, ScalarType, bad_gguf
from llmrun.formats.gguf.source import Source

# The size limit for everything before the tensor data. Gemma 4's header is 16 MB long: 262,144 tokens with scores
# and types, and 514,906 merges. The worst case is a header of only empty strings; reading it takes 2.3 s and 0.4 GB.
MAX_HEADER_BYTES = 128 * 2**20

# A header's length is unknown until it has been parsed, so the cursor reads this many bytes at a time.
_WINDOW_STEP = 2**20

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")


class Cursor:
    """A position in a header.

    Reading methods raise BadGGUF if bytes are missing. The argument `what` names the value in error messages.
    The cursor owns the header's memory, and all views of that memory are read-only.

    header  all bytes up to the limit; bytes that have not been read yet are 0
    """

    def __init__(self, source: Source, path: Path, *, window: int = _WINDOW_STEP, limit: int | None = None) -> None:
        """Start at the first byte of `source`.

        window  size of the first read in bytes; each read is twice as large as the previous one, up to _WINDOW_STEP
        limit   maximum number of bytes to read [default: MAX_HEADER_BYTES]; a longer header raises HeaderTooLong
        """
        self.path = path
        self.position = 0
        self.file_bytes = source.size
        self._source = source
        self._end = min(source.size, MAX_HEADER_BYTES if limit is None else limit)
        self._window = _reserved(self._end)
        self.header = self._window.toreadonly()
        self._data = self.header[:0]  # the bytes read so far
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
        """Read a u64 count of items that take at least `least_bytes` bytes each.

        Raises BadGGUF if the count exceeds `limit` or the items cannot fit in the remaining bytes.
        """
        n = self.u64(what)
        if n > limit:
            raise self.bad(what, f"must be at most {limit}, not {n}")
        if n * least_bytes > self.remaining:
            raise self._too_short(what, n * least_bytes, f"for {n} items, ")
        return n

    def text(self, what: str) -> bytes:
        """Read a string: its length (u64), then its bytes."""
        length = self.u64(what)
        start = self._take(length, what)
        return self._data[start : start + length].tobytes()

    def start(self, n: int) -> bytes:
        """Return the first n bytes of the file, or the whole file if the file is shorter."""
        self._fill(min(n, self._end))
        return self._data[:n].tobytes()

    def number(self, type_: ScalarType, what: str) -> bool | int | float:
        start = self._take(type_.layout.size, what)
        value: bool | int | float = type_.layout.unpack_from(self._data, start)[0]
        if type_.name != "bool":
            return value
        if value not in (0, 1):
            raise self.bad(what, f"a boolean must be 0 or 1, not {value}")
        return bool(value)

    def view(self, n: int, what: str) -> memoryview:
        """Return the next n bytes of the header."""
        start = self._take(n, what)
        return self._data[start : self.position]

    def strings(self, n: int, what: str) -> array[int]:
        """Skip n strings without decoding them, and return their positions.

        Returns int64[n + 1], the positions of the strings' length fields followed by the end of the last string. The
        loop takes 80 ns per string, which is most of the time needed to read a header.
        """
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
                # The next length field has not been read yet, or is past the end of the file.
                if position + 8 > self._end:
                    raise self._string_too_long(begins, what) from None
                self._fill(position + 8)
        if position > self._end:
            raise self._string_too_long(begins, what)
        self._fill(position)
        self.position = position
        return begins

    def skip_strings(self, n: int, what: str) -> None:
        """Skip n strings without recording their positions, which takes 60 ns per string."""
        length_at, position = _U64.unpack_from, self.position
        while n:
            data = self._data
            try:
                for n in range(n, 0, -1):  # noqa: B007, B020 (after an exception, n is the number of strings left)
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
        """Move to `position` and return the next n bytes, or fewer at the end of the file.

        The bytes between the last read and `position` are skipped and cannot be read later.
        """
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
        """Return the error for a file that ends inside the last string in `begins`.

        A position in `begins` that is itself past the end is ignored.
        """
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
        """Make sure that the bytes up to `end` have been read. Reads at least one whole step if bytes are missing."""
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
    """Allocate n zero bytes, which take up no physical memory until they are written."""
    if sys.platform == "win32":
        return memoryview(mmap.mmap(-1, max(n, 1)))[:n]
    return memoryview(mmap.mmap(-1, max(n, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:n]
