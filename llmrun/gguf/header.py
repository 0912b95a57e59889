"""The first part of a file: magic, version, counts, and the metadata as keys and values.

    bytes   field
    4       magic, "GGUF"
    4       version, u32
    8       number of tensors, u64
    8       number of keys, u64
    ...     for each key: its name (string), the type of its value (u32), the value

A string is its length (u64) and its bytes; an array is its element type (u32), its length (u64) and its elements.
Little-endian throughout. Source: ggml's docs/gguf.md; the rules are those of llama.cpp's gguf.cpp and some more.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.errors import BadGGUF
from llmrun.gguf.cursor import Cursor
from llmrun.gguf.problems import shown
from llmrun.gguf.values import ARRAY_ID, NUMBER_TYPES, STRING_ID, Value

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# Real files have some 40 keys and up to a few thousand tensors.
MAX_KEYS = 65_536
MAX_TENSORS = 65_536
MAX_KEY_BYTES = 65_535  # the format's own

_LEAST_KEY_BYTES = 8 + 1 + 4 + 1  # name of one byte, type, one byte of value
_LEAST_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # name of one byte, one dimension, type, offset

_OTHER_FILES = (
    (b"version https://git-lfs", "a Git LFS pointer, a note where the file should be: fetch it with `git lfs pull`"),
    (b"PK\x03\x04", "a zip archive, such as a PyTorch checkpoint"),
    (b"\x80\x02", "a pickle, such as an old PyTorch checkpoint"),
    (b"<", "a web page, such as an error page that was saved in place of the file"),
    (b"lmgg", "a model in the GGML format of 2023, from before GGUF"),
    (b"fmgg", "a model in the GGMF format of 2023, from before GGUF"),
    (b"tjgg", "a model in the GGJT format of 2023, from before GGUF"),
)


@dataclass(frozen=True)
class Header:
    """What the header says. `types` names each value's type as messages do: "u32", "str", "arr[f32]"."""

    version: int
    alignment: int
    tensor_count: int
    metadata: dict[str, Value]
    types: dict[str, str]


def read_header(cursor: Cursor) -> Header:
    """Read up to the first tensor's description. Raises BadGGUF."""
    _check_magic(cursor)
    version = _version(cursor)
    tensor_count = cursor.count("number of tensors", least_bytes=_LEAST_TENSOR_BYTES, limit=MAX_TENSORS)
    key_count = cursor.count("number of keys", least_bytes=_LEAST_KEY_BYTES, limit=MAX_KEYS)
    metadata: dict[str, Value] = {}
    types: dict[str, str] = {}
    for index in range(key_count):
        key = _key(cursor, index)
        if key in metadata:
            raise cursor.bad(shown(key), f"the key is there twice, again as key {index} of {key_count}")
        metadata[key], types[key] = _value(cursor, shown(key))
    _check_architecture(cursor, metadata, types)
    return Header(version, _alignment(cursor, metadata, types), tensor_count, metadata, types)


def _check_magic(cursor: Cursor) -> None:
    if cursor.file_bytes == 0:
        raise cursor.bad("magic", "the file is empty")
    start = cursor.start(32)
    if start[:4] == MAGIC:
        cursor.u32("magic")
        return
    for prefix, what in _OTHER_FILES:
        if start.startswith(prefix):
            raise cursor.bad("magic", f"this is {what}")
    if start[8:9] == b"{":
        raise cursor.bad("magic", "this is probably a safetensors file: a GGUF conversion of the model is needed")
    raise cursor.bad("magic", f"the file begins with '{shown(start[:4])}', a GGUF file with 'GGUF'")


def _version(cursor: Cursor) -> int:
    version = cursor.u32("version")
    if version in VERSIONS:
        return version
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if swapped in (1, *VERSIONS):
        raise cursor.bad("version", f"{swapped} with its bytes swapped: a file for big-endian machines")
    if version == 1:
        raise cursor.bad("version", "1, a format of August 2023 that nothing reads any more; 2 and 3 are read")
    raise cursor.bad("version", f"{version} seen, 2 and 3 are read")


def _key(cursor: Cursor, index: int) -> str:
    where = f"name of key {index}"
    raw = cursor.text(where)
    if not 0 < len(raw) <= MAX_KEY_BYTES:
        raise cursor.bad(where, f"{len(raw)} bytes long, must be 1 to {MAX_KEY_BYTES}")
    return checked_name(cursor, raw, where)


def checked_name(cursor: Cursor, raw: bytes, where: str) -> str:
    """A key or a tensor name. A NUL is refused because llama.cpp ends a name there: two names would become one."""
    if b"\0" in raw:
        raise cursor.bad(where, f"'{shown(raw)}' holds a NUL byte")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise cursor.bad(where, f"'{shown(raw)}' is not UTF-8 at byte {error.start}") from None


def _value(cursor: Cursor, key: str) -> tuple[Value, str]:
    type_id = cursor.u32(key)
    if type_id == STRING_ID:
        return cursor.text(key).decode(errors="replace"), "str"
    if type_id == ARRAY_ID:
        return _array(cursor, key)
    number = NUMBER_TYPES.get(type_id)
    if number is None:
        raise cursor.bad(key, f"value type {type_id} seen, 0 to {max(NUMBER_TYPES)} are known")
    return cursor.number(number, key), number.name


def _array(cursor: Cursor, key: str) -> tuple[Value, str]:
    type_id = cursor.u32(key)
    if type_id == STRING_ID:
        return cursor.string_array(key), "arr[str]"
    if type_id == ARRAY_ID:
        raise cursor.bad(key, "an array of arrays, which no reader takes")
    number = NUMBER_TYPES.get(type_id)
    if number is None:
        raise cursor.bad(key, f"array element type {type_id} seen, 0 to {max(NUMBER_TYPES)} are known")
    return cursor.number_array(number, key), f"arr[{number.name}]"


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
        raise cursor.bad(key, f"{alignment} seen, must be a power of two")
    return alignment


def _wrong_type(cursor: Cursor, key: str, seen: str, wanted: str) -> BadGGUF:
    return cursor.bad(key, f"a value of type {seen}, must be {wanted}")
