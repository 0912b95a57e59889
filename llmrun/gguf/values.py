"""The values a GGUF header holds. Numbers and strings in arrays stay as they were read until somebody asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from llmrun.gguf.cursor import Cursor
from llmrun.gguf.format import BOOL_ID, SCALAR_TYPES

_DTYPES = {id_: np.dtype("?" if id_ == BOOL_ID else type_.layout.format) for id_, type_ in SCALAR_TYPES.items()}

# Views of the header: read-only, and not aligned in memory, because the format aligns only tensors.
NumberArray = NDArray[np.generic]


class StringArray(Sequence[str]):
    """An array of strings in a header, decoded one by one when asked for.

    data     uint8[], the whole header
    starts   int64[n], where each string begins in data
    lengths  int64[n], its bytes
    """

    __slots__ = ("_positions", "data", "lengths", "starts")

    def __init__(self, data: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        self.data = data
        self.starts = starts
        self.lengths = lengths
        self._positions: dict[bytes, int] | None = None

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Decoded as UTF-8; a byte that is none becomes U+FFFD."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.raw(index).decode(errors="replace")

    def raw(self, index: int) -> bytes:
        start = int(self.starts[index])
        return self.data[start : start + int(self.lengths[index])].tobytes()

    def all_raw(self) -> list[bytes]:
        """Every string as bytes, in order. One copy of the region, then slices: 0.1 us a string, `raw` takes 0.35."""
        if not len(self):
            return []
        first = int(self.starts[0])
        region = self.data[first : int(self.starts[-1] + self.lengths[-1])].tobytes()
        begins = self.starts - first
        ends = begins + self.lengths
        return [region[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]

    def positions(self) -> dict[bytes, int]:
        """Where each string stands, the last of equal ones. Built once: the check that tokens are unique and the
        tokenizer both need it, and 128k tokens cost 25 ms."""
        if self._positions is None:
            strings = self.all_raw()
            self._positions = dict(zip(strings, range(len(strings)), strict=True))
        return self._positions


Value = bool | int | float | str | NumberArray | StringArray


def read_numbers(cursor: Cursor, type_id: int, n: int, what: str) -> NumberArray:
    """The next n numbers, a view of the header. Raises BadGGUF for those that are not there, and for wrong booleans."""
    raw = np.frombuffer(cursor.view(n * SCALAR_TYPES[type_id].layout.size, what), np.uint8)
    if type_id == BOOL_ID and raw.size and int(raw.max()) > 1:
        index = int(np.argmax(raw > 1))
        raise cursor.bad(what, f"a boolean of {raw[index]} at index {index}, must be 0 or 1")
    return raw.view(_DTYPES[type_id])


def read_strings(cursor: Cursor, n: int, what: str) -> StringArray:
    """The next n strings, none of which is decoded yet. Raises BadGGUF for those that are not there."""
    bounds = np.frombuffer(cursor.strings(n, what), np.int64)
    # A string's bytes follow its length, and the next length follows them.
    return StringArray(np.frombuffer(cursor.header, np.uint8), bounds[:-1] + 8, np.diff(bounds) - 8)
