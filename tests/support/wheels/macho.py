"""Reads libraries for macOS on Arm and checks their ad-hoc signatures, without running them.

macOS ends a process that executes a page without a valid signature. The sources of the structures are Apple's headers:
mach-o/loader.h and mach-o/nlist.h, and osfmk/kern/cs_blobs.h of XNU. All numbers are little-endian, except for those of
the signature, which are big-endian.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_MAGIC, _ARM64, _DYLIB, _MACOS = 0xFEEDFACF, 0x0100000C, 6, 1
_SYMTAB, _LOAD_DYLIB, _SEGMENT, _SIGNATURE, _BUILD_VERSION = 0x2, 0xC, 0x19, 0x1D, 0x32
_DYLD_INFO_ONLY, _EXPORTS_TRIE = 0x80000022, 0x80000033
_PAGE = 1 << 14  # the size of pages on Arm; segments begin at a page
_WRITE, _EXECUTE = 2, 4
_SUPER_BLOB, _CODE_DIRECTORY = 0xFADE0CC0, 0xFADE0C02
_WITH_TEXT_SEGMENT = 0x20400  # the first version of code directories that names the executable segment
_AD_HOC, _SHA256 = 0x2, 2


@dataclass
class Dylib:
    """A library for macOS.

    minimum    the oldest version of macOS that loads the library
    libraries  the names of the libraries that this one needs
    exported   the functions that dlsym finds, without the underscore that C puts before a name
    undefined  the functions that other libraries must have
    """

    minimum: tuple[int, int] = (0, 0)
    libraries: list[str] = field(default_factory=list)
    exported: set[str] = field(default_factory=set)
    undefined: set[str] = field(default_factory=set)


class BadDylib(Exception):
    """macOS on Arm would not load this library, or end the process that loads it."""


def read_dylib(path: Path) -> Dylib:
    """Read and check a library. Raises BadDylib."""
    data, found = path.read_bytes(), Dylib()
    try:
        _read(data, found)
    except (struct.error, IndexError, ValueError) as error:
        raise BadDylib(f"the file is truncated or damaged: {error}") from error
    return found


def _read(data: bytes, found: Dylib) -> None:
    magic, cpu, _, kind, count, _, _, _ = struct.unpack_from("<8I", data)
    _require((magic, cpu, kind) == (_MAGIC, _ARM64, _DYLIB), "it is not a library for 64-bit Arm")
    text, signature = (0, 0), (0, 0)
    at = 32
    for _ in range(count):
        command, size = struct.unpack_from("<2I", data, at)
        if command == _SEGMENT:
            name, start, _, offset, length, _, protection = struct.unpack_from("<16s4Q2I", data, at + 8)
            _require(start % _PAGE == 0 and offset % _PAGE == 0, f"segment {name!r} does not begin at a page")
            _require(offset + length <= len(data), f"segment {name!r} is longer than the file")
            _require(protection & (_WRITE | _EXECUTE) != _WRITE | _EXECUTE, f"segment {name!r} is writable code")
            if name.rstrip(b"\0") == b"__TEXT":
                text = offset, length
        elif command == _BUILD_VERSION:
            platform, version = struct.unpack_from("<2I", data, at + 8)
            _require(platform == _MACOS, "it is not for macOS")
            found.minimum = version >> 16, version >> 8 & 0xFF
        elif command == _LOAD_DYLIB:
            (name_at,) = struct.unpack_from("<I", data, at + 8)
            found.libraries.append(_text(data, at + name_at))
        elif command == _SYMTAB:
            found.undefined = set(_undefined(data, *struct.unpack_from("<4I", data, at + 8)))
        elif command in (_DYLD_INFO_ONLY, _EXPORTS_TRIE):
            offset, length = struct.unpack_from("<2I", data, at + (40 if command == _DYLD_INFO_ONLY else 8))
            found.exported |= set(_exported(data[offset : offset + length]) if length else ())
        elif command == _SIGNATURE:
            signature = struct.unpack_from("<2I", data, at + 8)
        at += size
    _require(signature != (0, 0), "it has no signature")
    _check_signature(data, *signature, text)


def _undefined(data: bytes, symbols: int, count: int, strings: int, _: int) -> Iterator[str]:
    """Yield the external symbols that are in no section."""
    for number in range(count):
        name, kind = struct.unpack_from("<IB", data, symbols + 16 * number)
        if kind & 0xEF == 0x01:  # N_EXT, and N_UNDF as the type; 0x10 is N_PEXT
            yield _text(data, strings + name).removeprefix("_")


def _exported(trie: bytes, at: int = 0, prefix: str = "") -> Iterator[str]:
    """Yield the names in a trie of exports."""
    length, at = _uleb128(trie, at)
    if length:
        yield prefix.removeprefix("_")
    at += length
    children, at = trie[at], at + 1
    for _ in range(children):
        edge = _text(trie, at)
        child, at = _uleb128(trie, at + len(edge.encode()) + 1)
        _require(child != 0, "its exports refer to themselves")
        yield from _exported(trie, child, prefix + edge)


def _check_signature(data: bytes, start: int, size: int, text: tuple[int, int]) -> None:
    """Check that the signature is ad hoc, covers the whole file, and has the SHA-256 of each page."""
    _require(start + size == len(data), "its signature is not at the end of the file")
    magic, _, count = struct.unpack_from(">3I", data, start)
    _require(magic == _SUPER_BLOB, "its signature is damaged")
    slots = dict(struct.unpack_from(">2I", data, start + 12 + 8 * number) for number in range(count))
    _require(0 in slots, "its signature has no code directory")
    at = start + slots[0]
    magic, _, version, flags, hashes, _, _, count, end = struct.unpack_from(">9I", data, at)
    size, kind, _, page_bits = struct.unpack_from(">4B", data, at + 36)
    _require(magic == _CODE_DIRECTORY and version >= _WITH_TEXT_SEGMENT, "its code directory is too old or damaged")
    _require(flags & _AD_HOC != 0, "its signature is not ad hoc")
    _require((size, kind) == (32, _SHA256), "its signature does not use SHA-256")
    _require(end == start, "its signature does not cover the whole file")
    _require(struct.unpack_from(">2Q", data, at + 64) == text, "its signature is for another executable segment")
    page = 1 << page_bits
    _require(count == -(-end // page), "its signature has the wrong number of pages")
    for number in range(count):
        expected = data[at + hashes + 32 * number :][:32]
        actual = hashlib.sha256(data[number * page : min((number + 1) * page, end)]).digest()
        _require(actual == expected, f"page {number} has another SHA-256 than in the signature")


def _uleb128(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of variable length, and where it ends."""
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 0x80:
            return value, at


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _require(is_so: bool, problem: str) -> None:
    if not is_so:
        raise BadDylib(problem)
