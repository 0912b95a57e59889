"""A file with the saved state of one sequence of the KV cache, and its format.

A file is a header of 64 bytes and records, which are only ever appended:

    header   MAGIC, and the key of the model and cache that the parts belong to (KVCache.key)
    record   kind, start, end, contents, size and sha256 of the data, seal; the tokens from start to end; the data

A seal is a sha256 of the previous seal, the record's other fields and its tokens. If a record is missing, a byte has
changed or the writer was killed, the file is therefore valid only up to that position.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Final

import numpy as np

from llmrun.backends.base import BLOCK_PART, CHECKPOINT_PART, SEQUENCE_PART, SavedPart
from llmrun.base.errors import IntegrityError
from llmrun.engine.saved_state.budget import MAGIC, NEW_ENDING, open_regular
from llmrun.engine.slots import common_prefix

HEADER_BYTES: Final = 64
_FIELDS: Final = struct.Struct("<12sIIQQ32s")  # kind, start, end, contents, size of the data, its sha256
_SEAL_BYTES: Final = 32
TOKEN: Final = np.dtype("<i8")  # the ids of tokens with adapters have up to 63 bits (engine/adapters.py)


@dataclass(frozen=True, slots=True)
class Record:
    """A saved part as a record in a file.

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
    """Return the initial seal, from which the seal of the first record is computed."""
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
    """Return the number of bytes that a part occupies in a file."""
    return _FIELDS.size + _SEAL_BYTES + TOKEN.itemsize * (part.end - part.start) + part.n_bytes


def read_records(path: Path, key: str) -> Iterator[Record]:
    """Yield the records of a file up to the first damaged record, without reading the data.

    Yields nothing if the file does not exist, is not a saved state, or has a different key. A part opens the file again
    to read its data, and raises IntegrityError if the data has changed. Raises OSError.
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


# A file is replaced once it is larger than twice its useful parts plus this many bytes.
_SLACK: Final = 1 << 20


class StateFile:
    """The saved parts in a file.

    tokens       the saved tokens
    parts        the parts that are still useful, in order of position. Later records replace earlier ones
    whole_bytes  the size of the file without damaged or incomplete records at its end
    """

    def __init__(self, path: Path, key: str) -> None:
        """Read the file, but not yet the data of its parts. A missing file counts as empty. Raises OSError."""
        self.path = path
        self._key = key
        self.tokens: list[int] = []
        self.parts: list[SavedPart] = []
        self.whole_bytes = 0
        self._seal = first_seal(key)
        for record in read_records(path, key):
            if not self._take(record):
                break

    def lacking(self, tokens: Sequence[int], parts: Iterable[SavedPart]) -> list[SavedPart]:
        """Return the parts of a sequence that the file does not contain."""
        common = common_prefix(self.tokens, list(tokens))
        blocks = {part.start: part for part in self.parts if part.kind == BLOCK_PART}
        states = {part.end for part in self.parts if part.kind == CHECKPOINT_PART}
        whole = max((part.end for part in self.parts if part.kind == SEQUENCE_PART), default=0)

        def has(part: SavedPart) -> bool:
            if part.end > common:
                return False
            if part.kind == SEQUENCE_PART:
                return part.end <= whole
            if part.kind == CHECKPOINT_PART:
                return part.end in states
            return part.start in blocks and not part.contents & ~blocks[part.start].contents

        return [part for part in parts if not has(part)]

    def save(self, tokens: Sequence[int], parts: Sequence[SavedPart], has_room: Callable[[int], bool]) -> bool:
        """Append the parts of a sequence that the file lacks, or write all parts into a new file.

        has_room  called with the number of bytes by which the file will grow, which can be negative. If it returns
                  False, nothing is saved, and the result is False

        If the process is killed while writing, no earlier part is lost. Raises OSError without changing the file.
        """
        new = self.lacking(tokens, parts)
        if not new:
            return True
        added, useful = sum(map(record_size, new)), sum(map(record_size, parts))
        becomes_too_large = not self.whole_bytes or self.whole_bytes + added > 2 * useful + _SLACK
        if not has_room(HEADER_BYTES + useful - self.whole_bytes if becomes_too_large else added):
            return False
        if becomes_too_large:
            self._write_anew(tokens, parts)
        else:
            self._append(tokens, new)
        return True

    def _append(self, tokens: Sequence[int], new: Iterable[SavedPart]) -> None:
        with self.path.open("r+b", buffering=0) as file:
            file.truncate(self.whole_bytes)  # removes a record that a killed writer left incomplete
            file.seek(self.whole_bytes)
            try:
                self._seal = _write_records(file, tokens, new, self._seal)
            except BaseException:
                with contextlib.suppress(OSError):
                    file.truncate(self.whole_bytes)
                raise
            self.whole_bytes = file.tell()

    def _write_anew(self, tokens: Sequence[int], parts: Iterable[SavedPart]) -> None:
        # Only this user may read the file. Other processes may be writing the same state at the same time.
        descriptor, name = tempfile.mkstemp(NEW_ENDING, ".", self.path.parent)
        partial = Path(name)
        try:
            with open(descriptor, "wb", buffering=0) as file:  # noqa: PTH123  pathlib cannot open a descriptor
                _write(file, header(self._key))
                _write_records(file, tokens, parts, first_seal(self._key))
            partial.replace(self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise

    def _take(self, record: Record) -> bool:
        """Add the next record of the file. Returns False if the record does not continue the earlier records."""
        part = record.part
        if part.kind == SEQUENCE_PART and part.start == 0:
            self.tokens, self.parts = record.tokens, [part]
        elif part.kind == BLOCK_PART and part.start <= len(self.tokens) and part.start < part.end:
            if part.start < len(self.tokens):
                common = part.start + common_prefix(self.tokens[part.start :], record.tokens)
                self.parts = [
                    each
                    for each in self.parts
                    if (each.start < part.start if each.kind == BLOCK_PART else each.end <= common)
                ]
            self.tokens[part.start :] = record.tokens
            self.parts.append(part)
        elif part.kind == CHECKPOINT_PART and part.start == part.end <= len(self.tokens):
            same = (CHECKPOINT_PART, part.end)
            self.parts = [each for each in self.parts if (each.kind, each.end) != same] + [part]
        else:
            return False
        self.whole_bytes, self._seal = record.end, record.seal
        return True


def _write_records(file: IO[bytes], tokens: Sequence[int], parts: Iterable[SavedPart], seal: bytes) -> bytes:
    """Write parts as records, and return the seal of the last record."""
    for part in parts:
        fields, data, seal = record_bytes(part, list(tokens[part.start : part.end]), seal)
        _write(file, fields)
        _write(file, data)
    return seal


def _write(file: IO[bytes], data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
