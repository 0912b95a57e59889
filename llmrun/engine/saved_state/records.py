"""The format of files with saved parts of the KV cache: how a record is written and checked.

A file is a header of 64 bytes and records, which are only ever appended:

    header   MAGIC, and the key of the model and cache that the parts belong to (KVCache.key)
    record   kind, start, end, contents, size and sha256 of the data, seal; the tokens from start to end; the data

A seal is a sha256 of the previous seal, the record's other fields and its tokens. A file from which a record is missing
or in which a byte has changed is therefore valid only up to that place. The same holds if its writer was killed.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from llmrun.backends.saved_parts import SavedPart
from llmrun.base.errors import IntegrityError
from llmrun.engine.saved_state.magic import MAGIC, open_regular

HEADER_BYTES: Final = 64
_FIELDS: Final = struct.Struct("<12sIIQQ32s")  # kind, start, end, contents, size of the data, its sha256
_SEAL_BYTES: Final = 32
TOKEN: Final = np.dtype("<i8")  # tokens with adapters have large numbers (engine/adapters.py)


@dataclass(frozen=True, slots=True)
class Record:
    """A part in a file.

    tokens  the tokens from `part.start` to `part.end`; empty for checkpoints
    end     offset of the byte after the record
    seal    the record's seal
    """

    part: SavedPart
    tokens: list[int]
    end: int
    seal: bytes


def header(key: str) -> bytes:
    """Return the header of a file. `key` is a sha256 in hexadecimal."""
    return (MAGIC + bytes.fromhex(key)).ljust(HEADER_BYTES, b"\0")


def first_seal(key: str) -> bytes:
    """Return the seal to which the first record is added."""
    return hashlib.sha256(header(key)).digest()


def record_bytes(part: SavedPart, tokens: list[int], seal: bytes) -> tuple[bytes, memoryview, bytes]:
    """Return (a record's fields and tokens, its data, its seal), given the seal of the record before it."""
    data = memoryview(part.read()).cast("B")
    kind = part.kind.encode().ljust(12, b"\0")
    fields = _FIELDS.pack(kind, part.start, part.end, part.contents, len(data), hashlib.sha256(data).digest())
    ids = np.array(tokens, TOKEN).tobytes()
    own = hashlib.sha256(seal + fields + ids).digest()
    return fields + own + ids, data, own


def record_size(part: SavedPart) -> int:
    """Return the number of bytes that a part takes in a file."""
    return _FIELDS.size + _SEAL_BYTES + TOKEN.itemsize * (part.end - part.start) + part.n_bytes


def read_records(path: Path, key: str) -> Iterator[Record]:
    """Yield the records of a file from the first one to the last before any damage, without reading their data.

    Yields nothing if the file does not exist, is not a saved state or has another key. A part opens the file again to
    read its data, and raises IntegrityError if the data has changed. Raises OSError.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        size = os.fstat(file.fileno()).st_size
        if file.read(HEADER_BYTES) != header(key):
            return
        at, seal = HEADER_BYTES, first_seal(key)
        while at + _FIELDS.size + _SEAL_BYTES <= size:
            file.seek(at)
            fields, own = file.read(_FIELDS.size), file.read(_SEAL_BYTES)
            if len(own) < _SEAL_BYTES:
                return
            kind, start, end, contents, n_bytes, digest = _FIELDS.unpack(fields)
            data_at = at + _FIELDS.size + _SEAL_BYTES + TOKEN.itemsize * max(0, end - start)
            if data_at + n_bytes > size or end < start:
                return
            ids = file.read(TOKEN.itemsize * (end - start))
            if hashlib.sha256(seal + fields + ids).digest() != own:
                return
            read = partial(_checked_data, path, data_at, n_bytes, digest)
            part = SavedPart(kind.rstrip(b"\0").decode("latin-1"), start, end, contents, n_bytes, read)
            at, seal = data_at + n_bytes, own
            yield Record(part, np.frombuffer(ids, TOKEN).tolist(), at, own)


def _checked_data(path: Path, start: int, n_bytes: int, digest: bytes) -> bytes:
    try:
        with open_regular(path) as file:
            file.seek(start)
            data = file.read(n_bytes)
    except OSError as error:
        raise IntegrityError(f"saved state cannot be read: {path}: {error.strerror}") from error
    if len(data) != n_bytes or hashlib.sha256(data).digest() != digest:
        raise IntegrityError(f"saved state is damaged: {path}: wrong sha256 of the data at byte {start:,}")
    return data
