"""Reads safetensors files strictly.

A file has the length of its header (u64), the header (JSON), and the data of its tensors without gaps. The header maps
the name of each tensor to its type, its shape and the offsets of its data. The safetensors library would need PyTorch
for BF16, of which NumPy has no type.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmrun.base.errors import ModelFileError
from llmrun.formats.gguf.problems import shown
from llmrun.formats.gguf.source import FileSource
from llmrun.jobs.converting.json_objects import bad_checkpoint, parse_object

_MOST_HEADER_BYTES = 16 << 20  # The header of a model with 70 billion weights has 0.3 MB.
_MOST_SIZE = 1 << 48  # of a dimension and of a tensor in bytes, so that products stay small integers
_MOST_DIMENSIONS = 64  # NumPy's limit
_METADATA = "__metadata__"

# NumPy types of the same size. BF16 is read as its bits.
DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "<i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "<u1",
    "BOOL": "<u1",
    "F8_E4M3": "<u1",
    "F8_E5M2": "<u1",
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. `shape` is in NumPy's order, and `begin` is in bytes from the start of the file."""

    file: SafetensorsFile
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    def read(self) -> NDArray[Any]:
        """Read the whole tensor. BF16 is returned as uint16. Raises ModelFileError."""
        return self.read_rows(0, self.shape[0] if self.shape else 1).reshape(self.shape)

    def read_rows(self, first: int, end: int) -> NDArray[Any]:
        """Read the rows `first` to `end` of the first dimension. Raises ModelFileError."""
        row_shape = self.shape[1:]
        data = np.empty((end - first, *row_shape), DTYPES[self.dtype])
        row_bytes = data.itemsize * prod(row_shape)
        self.file.source.read(self.begin + first * row_bytes, data.reshape(-1).view(np.uint8).data)
        return data

    def bad(self, seen: str) -> ModelFileError:
        return bad_checkpoint(self.file.path, f"{shown(self.name)} {seen}")


class SafetensorsFile:
    """An open file, whose header has been checked. `tensors` maps names to tensors, in the order of their data."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises ModelNotFound and ModelFileError."""
        self.path = path
        self.source = FileSource(path)
        try:
            self.tensors = self._read_header()
        except BaseException:
            self.source.close()
            raise

    def close(self) -> None:
        self.source.close()

    def _read_header(self) -> dict[str, StoredTensor]:
        if self.source.size < 8:
            raise bad_checkpoint(self.path, f"has {self.source.size} bytes, too few for a safetensors file")
        length = int.from_bytes(self._bytes(0, 8), "little")
        start = 8 + length
        if start > self.source.size or length > _MOST_HEADER_BYTES:
            limit = min(self.source.size - 8, _MOST_HEADER_BYTES)
            raise bad_checkpoint(self.path, f"the header must have at most {limit:,} bytes, not {length:,}")
        try:
            text = self._bytes(8, length).decode()
        except UnicodeDecodeError:
            raise bad_checkpoint(self.path, "is not a safetensors file, or its header is damaged") from None
        header = parse_object(text, self.path)
        found = [self._tensor(name, header.object(name).values, start) for name in header.values if name != _METADATA]
        found.sort(key=lambda tensor: (tensor.begin, tensor.nbytes))
        end = start
        for tensor in found:
            if tensor.begin != end:
                raise tensor.bad(f"begins at byte {tensor.begin:,}, but the data before it ends at byte {end:,}")
            end += tensor.nbytes
        if end != self.source.size:
            seen = f"has {self.source.size:,} bytes, but its tensors end at byte {end:,}"
            raise bad_checkpoint(self.path, f"{seen}; it may be incomplete" if end > self.source.size else seen)
        return {tensor.name: tensor for tensor in found}

    def _tensor(self, name: str, entry: Any, start: int) -> StoredTensor:
        """Check one entry of the header. The offsets in it are from the end of the header, at byte `start`."""
        dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise bad_checkpoint(self.path, f"{shown(name)} has the unknown type '{shown(str(dtype), 40)}'")
        if not _are_sizes(shape) or prod(shape) > _MOST_SIZE:
            raise bad_checkpoint(self.path, f"{shown(name)} has an invalid shape")
        if not _are_sizes(offsets) or len(offsets) != 2:
            raise bad_checkpoint(self.path, f"{shown(name)} has invalid data_offsets")
        nbytes = prod(shape) * np.dtype(DTYPES[dtype]).itemsize
        if offsets[1] - offsets[0] != nbytes:
            seen = f"{shown(name)} needs {nbytes:,} bytes, but has {offsets[1] - offsets[0]:,}"
            raise bad_checkpoint(self.path, seen)
        return StoredTensor(self, name, dtype, tuple(shape), start + offsets[0], nbytes)

    def _bytes(self, offset: int, n: int) -> bytes:
        data = bytearray(n)
        self.source.read(offset, memoryview(data))
        return bytes(data)


def _are_sizes(value: Any) -> bool:
    if not isinstance(value, list) or len(value) > _MOST_DIMENSIONS:
        return False
    return all(type(size) is int and 0 <= size <= _MOST_SIZE for size in value)
