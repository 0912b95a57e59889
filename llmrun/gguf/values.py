"""The values a GGUF header holds. Numbers and strings in arrays stay as they were read until somebody asks."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

BOOL_ID = 7
STRING_ID = 8
ARRAY_ID = 9


@dataclass(frozen=True)
class NumberType:
    """A fixed-size value type of the format: its name in messages, how to unpack one, and its NumPy type."""

    name: str
    layout: struct.Struct
    dtype: np.dtype[np.generic]


def _number(name: str, code: str, dtype: str) -> NumberType:
    return NumberType(name, struct.Struct("<" + code), np.dtype(dtype))


NUMBER_TYPES: dict[int, NumberType] = {
    0: _number("u8", "B", "u1"),
    1: _number("i8", "b", "i1"),
    2: _number("u16", "H", "<u2"),
    3: _number("i16", "h", "<i2"),
    4: _number("u32", "I", "<u4"),
    5: _number("i32", "i", "<i4"),
    6: _number("f32", "f", "<f4"),
    BOOL_ID: _number("bool", "B", "?"),
    10: _number("u64", "Q", "<u8"),
    11: _number("i64", "q", "<i8"),
    12: _number("f64", "d", "<f8"),
}

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
