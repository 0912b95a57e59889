"""Writes GGUF files: first the whole header, then the tensors, one after another.

The header fits in memory, but a whole model does not. The data of each tensor is therefore produced piece by piece
during writing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from llmrun.formats.gguf.format import ARRAY_ID, BOOL_ID, DEFAULT_ALIGNMENT, MAGIC, SCALAR_TYPES, STRING_ID, VERSIONS
from llmrun.formats.quants.weight_type import WeightType

# Python's int and float are written as u32 and f32, which almost all keys use. NumPy's numbers keep their type.
NewValue = bool | int | float | str | Sequence[str] | np.generic | NDArray[np.generic]

_U32, _F32 = 4, 6
_NUMBER_IDS = {np.dtype("?" if id_ == BOOL_ID else scalar.layout.format): id_ for id_, scalar in SCALAR_TYPES.items()}


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write.

    shape  in GGUF's order, with the row length first
    data   a function that yields the bytes, as contiguous arrays of `nbytes` bytes in total
    """

    name: str
    type: WeightType
    shape: tuple[int, ...]
    data: Callable[[], Iterable[NDArray[np.generic]]]

    @property
    def nbytes(self) -> int:
        return self.type.row_bytes(self.shape[0]) * prod(self.shape[1:])


def header_bytes(metadata: Mapping[str, NewValue], tensors: Sequence[NewTensor]) -> bytes:
    """Return everything before the data of the first tensor, with the padding.

    Raises ValueError if a value does not fit its type, and UnicodeEncodeError for text with unpaired surrogates.
    """
    parts = [MAGIC, struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), *_value(key, value)]
    offset = 0
    for tensor in tensors:
        sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        parts += [_string(tensor.name), sizes, struct.pack("<IQ", tensor.type.ggml_id, offset)]
        offset += _aligned(tensor.nbytes)
    header = b"".join(parts)
    return header.ljust(_aligned(len(header)), b"\0")


def file_bytes(metadata: Mapping[str, NewValue], tensors: Sequence[NewTensor]) -> int:
    """Return the size of the file that `write_gguf` writes. Raises the errors of `header_bytes`."""
    return len(header_bytes(metadata, tensors)) + sum(_aligned(tensor.nbytes) for tensor in tensors)


def write_gguf(
    file: BinaryIO,
    metadata: Mapping[str, NewValue],
    tensors: Sequence[NewTensor],
    written: Callable[[int], None] = lambda _: None,
) -> None:
    """Write a whole file. The data of each tensor is produced only when the tensor is written.

    written  a function that receives the size in bytes of each piece of a tensor that has been written
    Raises OSError, the errors of `header_bytes`, and ValueError if a tensor's data does not match its shape.
    """
    _write(file, header_bytes(metadata, tensors))
    for tensor in tensors:
        size = 0
        for piece in tensor.data():
            _write(file, np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
            size += piece.nbytes
            written(piece.nbytes)
        if size != tensor.nbytes:
            raise ValueError(f"{tensor.name} has {size} bytes, but its shape needs {tensor.nbytes}")
        _write(file, bytes(_aligned(size) - size))


def _write(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write all bytes, even to an unbuffered file, which may accept only part of the data at a time."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _aligned(size: int) -> int:
    return -(-size // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(key: str, value: NewValue) -> list[bytes]:
    """Return the type and the bytes of a value."""
    if isinstance(value, str):
        return [_id(STRING_ID), _string(value)]
    if isinstance(value, np.generic):
        return [_id(_NUMBER_IDS[value.dtype]), value.tobytes()]
    if isinstance(value, np.ndarray):
        return [_id(ARRAY_ID), _id(_NUMBER_IDS[value.dtype]), struct.pack("<Q", value.size), value.tobytes()]
    if isinstance(value, bool | int | float):
        id_ = BOOL_ID if isinstance(value, bool) else _U32 if isinstance(value, int) else _F32
        try:
            return [_id(id_), SCALAR_TYPES[id_].layout.pack(value)]
        except (struct.error, OverflowError):
            raise ValueError(f"{key}: {value} does not fit into a {SCALAR_TYPES[id_].name}") from None
    return [_id(ARRAY_ID), _id(STRING_ID), struct.pack("<Q", len(value)), *map(_string, value)]


def _id(number: int) -> bytes:
    return struct.pack("<I", number)
