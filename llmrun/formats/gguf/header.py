"""Reads the first part of a GGUF file, which contains the magic, the version, the counts and the metadata.

    bytes   field
    4       magic, "GGUF"
    4       version, u32
    8       number of tensors, u64
    8       number of keys, u64
    ...     for each key: its name (string), the type of its value (u32), the value

A string is its length (u64), then its bytes. An array is its element type (u32), its length (u64), then its elements.
Everything is little-endian. The format is described in ggml's docs/gguf.md. This module enforces the rules
of llama.cpp's gguf.cpp and some stricter ones. NumPy is imported only when the first array is read.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from msgspec import Struct

from llmrun.base.errors import BadGGUF, shown
from llmrun.formats.gguf.cursor import Cursor
from llmrun.formats.gguf.format import (
    ARRAY_ID,
    DEFAULT_ALIGNMENT,
    MAX_ARRAY_ELEMENTS,
    MAX_KEY_BYTES,
    MAX_KEYS,
    MAX_TENSORS,
    SCALAR_TYPES,
    STRING_ID,
    magic_problem,
    version_problem,
)

if TYPE_CHECKING:
    from llmrun.formats.gguf.metadata import Value

_LEAST_KEY_BYTES = 8 + 1 + 4 + 1  # a one-byte name, a type and a one-byte value
_LEAST_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # a one-byte name, one dimension, a type and an offset


class Header(Struct, frozen=True):
    """The contents of a header. `types` maps each key to the name of its type, such as "u32", "str" or "arr[f32]"."""

    version: int
    alignment: int
    tensor_count: int
    metadata: dict[str, Value]
    types: dict[str, str]


class Counts(Struct, frozen=True):
    """The version and the counts at the start of a file."""

    version: int
    tensors: int
    keys: int


def read_header(cursor: Cursor) -> Header:
    """Read everything before the first tensor description. Raises BadGGUF."""
    counts = read_counts(cursor)
    metadata: dict[str, Value] = {}
    types: dict[str, str] = {}
    for index in range(counts.keys):
        key = read_key(cursor, index, counts.keys, types)
        metadata[key], types[key] = read_value(cursor, key)
    return checked_header(cursor, counts, metadata, types)


def read_counts(cursor: Cursor) -> Counts:
    _check_magic(cursor)
    version = _version(cursor)
    tensor_count = cursor.count("number of tensors", least_bytes=_LEAST_TENSOR_BYTES, limit=MAX_TENSORS)
    key_count = cursor.count("number of keys", least_bytes=_LEAST_KEY_BYTES, limit=MAX_KEYS)
    return Counts(version, tensor_count, key_count)


def read_key(cursor: Cursor, index: int, count: int, before: Container[str]) -> str:
    """Read the name of a key. Raises BadGGUF if the key is in `before`, the keys already read."""
    key = _key(cursor, index)
    if key in before:
        raise cursor.bad(shown(key), f"duplicate key, used again by key {index} of {count}")
    return key


def read_value(cursor: Cursor, key: str) -> tuple[Value, str]:
    """Read a value. Returns the value and the name of its type."""
    where = shown(key)
    type_id = cursor.u32(where)
    if type_id != ARRAY_ID:
        return read_single(cursor, type_id, where)
    from llmrun.formats.gguf.metadata import read_numbers, read_strings

    element_id, n = read_array_start(cursor, where)
    if element_id == STRING_ID:
        return read_strings(cursor, n, where), "arr[str]"
    return read_numbers(cursor, element_id, n, where), f"arr[{SCALAR_TYPES[element_id].name}]"


def read_single(cursor: Cursor, type_id: int, where: str) -> tuple[bool | int | float | str, str]:
    """Read a string or a number of the given type. Returns the value and the name of its type."""
    if type_id == STRING_ID:
        return cursor.text(where).decode(errors="replace"), "str"
    if type_id not in SCALAR_TYPES:
        raise cursor.bad(where, f"unknown value type {type_id} (known: 0 to {max(SCALAR_TYPES)})")
    return cursor.number(SCALAR_TYPES[type_id], where), SCALAR_TYPES[type_id].name


def read_array_start(cursor: Cursor, where: str) -> tuple[int, int]:
    """Read the start of an array. Returns (element type ID, number of elements)."""
    type_id = cursor.u32(where)
    if type_id == ARRAY_ID:
        raise cursor.bad(where, "arrays of arrays are not supported")
    if type_id != STRING_ID and type_id not in SCALAR_TYPES:
        raise cursor.bad(where, f"unknown array element type {type_id} (known: 0 to {max(SCALAR_TYPES)})")
    least_bytes = 8 if type_id == STRING_ID else SCALAR_TYPES[type_id].layout.size
    return type_id, cursor.count(where, least_bytes=least_bytes, limit=MAX_ARRAY_ELEMENTS)


def checked_header(cursor: Cursor, counts: Counts, metadata: dict[str, Value], types: dict[str, str]) -> Header:
    """Check the keys that affect the rest of the file, and return the header. Raises BadGGUF."""
    _check_architecture(cursor, metadata, types)
    return Header(counts.version, _alignment(cursor, metadata, types), counts.tensors, metadata, types)


def _check_magic(cursor: Cursor) -> None:
    if problem := magic_problem(cursor.start(32)):
        raise cursor.bad("magic", problem)
    cursor.u32("magic")


def _version(cursor: Cursor) -> int:
    version = cursor.u32("version")
    if problem := version_problem(version):
        raise cursor.bad("version", problem)
    return version


def _key(cursor: Cursor, index: int) -> str:
    where = f"name of key {index}"
    raw = cursor.text(where)
    if not 0 < len(raw) <= MAX_KEY_BYTES:
        raise cursor.bad(where, f"must be 1 to {MAX_KEY_BYTES} bytes long, not {len(raw)}")
    return checked_name(cursor, raw, where)


def checked_name(cursor: Cursor, raw: bytes, where: str) -> str:
    """Decode a key or a tensor name. Raises BadGGUF if the name is not UTF-8 or contains a NUL byte.

    llama.cpp truncates names at the first NUL byte, so two different names could become equal.
    """
    if b"\0" in raw:
        raise cursor.bad(where, f"'{shown(raw)}' contains a NUL byte")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise cursor.bad(where, f"'{shown(raw)}' is not UTF-8 at byte {error.start}") from None


def _check_architecture(cursor: Cursor, metadata: dict[str, Value], types: dict[str, str]) -> None:
    key = "general.architecture"
    if key in metadata and types[key] != "str":
        raise _wrong_type(cursor, key, types[key], "str")


def _alignment(cursor: Cursor, metadata: dict[str, Value], types: dict[str, str]) -> int:
    key = "general.alignment"
    if key not in metadata:
        return DEFAULT_ALIGNMENT
    alignment = metadata[key]
    if types[key] != "u32" or not isinstance(alignment, int):
        raise _wrong_type(cursor, key, types[key], "u32")
    if alignment == 0 or alignment & (alignment - 1):
        raise cursor.bad(key, f"must be a power of two, not {alignment}")
    return alignment


def _wrong_type(cursor: Cursor, key: str, seen: str, wanted: str) -> BadGGUF:
    return cursor.bad(key, f"must be {wanted}, not {seen}")
