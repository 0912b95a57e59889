"""The constants of the GGUF format (magic, limits and value types), and the errors for files that break its rules.

Messages name the file, the key and the value found. This module does not import NumPy.
"""

from __future__ import annotations

import struct
from pathlib import Path

from msgspec import Struct

from llmrun.base.amounts import format_bytes
from llmrun.base.errors import BadGGUF, shown

_HINT = (
    "Download the file again. If this error comes back, the file itself is faulty: use another copy or quantization."
)


class HeaderTooLong(BadGGUF):
    """The header is longer than the reader's limit, although the file itself may be complete."""


def bad_gguf(path: Path, where: str, seen: str, kind: type[BadGGUF] = BadGGUF) -> BadGGUF:
    """Return the error for a file that breaks a rule of the format.

    where  the key, tensor or part of the header
    seen   the value found, and the limit
    """
    return kind(f"not a valid GGUF file: {shown(str(path), 300)}: {where}: {seen}", hint=_HINT)


def incomplete(path: Path, seen: int, needed: int) -> BadGGUF:
    """Return the error for a file of only `seen` bytes whose tensors end at byte `needed`."""
    sizes = f"{format_bytes(seen)} of {format_bytes(needed)}"
    if format_bytes(seen) == format_bytes(needed):
        sizes = f"{seen:,} of {needed:,} bytes"
    return BadGGUF(
        f"incomplete GGUF file: {shown(str(path), 300)}: {sizes}; the download or copy may have stopped early",
        hint="Download or copy the file again; `llmrun pull` also checks the file.",
    )


MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# Real files have about 40 keys and at most a few thousand tensors.
MAX_KEYS = 65_536
MAX_TENSORS = 65_536
MAX_KEY_BYTES = 65_535  # the limit in the GGUF specification
MAX_ARRAY_ELEMENTS = 2**30  # llama.cpp's GGUF_MAX_ARRAY_ELEMENTS

BOOL_ID = 7
STRING_ID = 8
ARRAY_ID = 9


class ScalarType(Struct, frozen=True):
    """A fixed-size value type, with its binary layout and its name in error messages."""

    name: str
    layout: struct.Struct


def _scalar(name: str, code: str) -> ScalarType:
    return ScalarType(name, struct.Struct("<" + code))


SCALAR_TYPES: dict[int, ScalarType] = {
    0: _scalar("u8", "B"),
    1: _scalar("i8", "b"),
    2: _scalar("u16", "H"),
    3: _scalar("i16", "h"),
    4: _scalar("u32", "I"),
    5: _scalar("i32", "i"),
    6: _scalar("f32", "f"),
    BOOL_ID: _scalar("bool", "B"),
    10: _scalar("u64", "Q"),
    11: _scalar("i64", "q"),
    12: _scalar("f64", "d"),
}

_OTHER_FILES = (
    (b"version https://git-lfs", "a Git LFS pointer instead of the file, which `git lfs pull` fetches"),
    (b"PK\x03\x04", "a zip archive, such as a PyTorch checkpoint"),
    (b"\x80\x02", "a pickle, such as an old PyTorch checkpoint"),
    (b"<", "a web page, such as an error page saved instead of the file"),
    (b"lmgg", "a model in the GGML format of 2023, from before GGUF"),
    (b"fmgg", "a model in the GGMF format of 2023, from before GGUF"),
    (b"tjgg", "a model in the GGJT format of 2023, from before GGUF"),
)


def magic_problem(start: bytes) -> str:
    """Describe why a file whose first 32 bytes are `start` is not GGUF. Returns "" for a GGUF file."""
    if not start:
        return "the file is empty"
    if start[:4] == MAGIC:
        return ""
    for prefix, what in _OTHER_FILES:
        if start.startswith(prefix):
            return f"this is {what}"
    if start[8:9] == b"{":
        return "this is probably a safetensors file; `llmrun convert` converts many such models to GGUF"
    return f"must be 'GGUF', but the file begins with '{shown(start[:4])}'"


def version_problem(version: int) -> str:
    """Describe why a version number is not supported. Returns "" for a supported version."""
    if version in VERSIONS:
        return ""
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if swapped in (1, *VERSIONS):
        return f"{swapped} with its bytes swapped, so this file is for big-endian machines"
    if version == 1:
        return "must be 2 or 3; version 1, of August 2023, is obsolete"
    return f"must be 2 or 3, not {version}"
