"""Stores a record of each model that llmrun has downloaded, verified or run, as a small JSON file.

A record contains the name that the user asked for, the time of last use, and the sha256 of each file together with the
size and modification time that the file had when it was hashed. Records are only a cache. A model without a record is
hashed again, and a record whose file was deleted is ignored.

A record belongs to the file at the end of a chain of links, so two snapshots that link to the same blob share one
record.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, structs, to_builtins

from llmrun.base.folders import write_whole
from llmrun.hub.local import paths
from llmrun.hub.names import SHA256, first_shard

_VERSION = 1
_MOST_BYTES = 1 << 20  # the maximum size of a record; a thousand shards take a quarter of it
_MOST_TEXT = 8192  # characters in a string; paths and URLs may be long


class FileRecord(Struct, frozen=True):
    """The state of a file when it was recorded. `modified` is in whole seconds."""

    path: str  # an absolute path
    size: int
    modified: int
    sha256: str  # "" if the file was not hashed


class ModelRecord(Struct, frozen=True):
    """A model on this machine. `files[0]` is the file to open."""

    name: str  # the name that the user gave, such as "qwen3:4b"; "" if the user gave a path
    source: str  # a Source converted to text
    commit: str  # the repository's commit; "" if the source has no commits
    files: tuple[FileRecord, ...]
    fetched: float  # download time in seconds since 1970; 0.0 if llmrun did not download it
    used: float  # time of last use in seconds since 1970; 0.0 if never used


def file_record(path: Path, sha256: str = "") -> FileRecord:
    """Return a record of a file's current state. Raises OSError.

    The modification time is in whole seconds because archives and container images do not store fractions.
    """
    status = path.stat()
    return FileRecord(os.path.abspath(path), status.st_size, int(status.st_mtime), sha256)  # noqa: PTH100


def record_path(model: Path) -> Path:
    """Return the path of a model's record, which may not exist."""
    return paths.record_file(Path(os.path.realpath(model)))


def read_record(model: Path) -> ModelRecord | None:
    """Return the record of the model whose first file is `model`, or None if no valid record exists."""
    return _read(record_path(model))


def _read(path: Path) -> ModelRecord | None:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            return None
        return _record(json.loads(data))
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def records_named(name: str) -> list[ModelRecord]:
    """Return the records of the models that the user asked for by this name. Reading all records takes milliseconds."""
    found = (_read(Path(entry.path)) for entry in paths.entries(record_path(Path()).parent))
    return [record for record in found if record and record.name == name]


def write_record(record: ModelRecord) -> None:
    """Write a record atomically. Errors are ignored, because without a record the model is just verified again."""
    with contextlib.suppress(OSError):
        data = json.dumps({"version": _VERSION} | to_builtins(record)).encode()
        write_whole(record_path(Path(record.files[0].path)), data)


def forget(model: Path) -> None:
    """Remove a model's record, if there is one. Errors are ignored, because an outdated record does no harm."""
    with contextlib.suppress(OSError):
        record_path(model).unlink(missing_ok=True)


def mark_used(model: Path) -> None:
    """Record that the model is being opened now."""
    record = read_record(model)
    if record is None:
        try:
            record = ModelRecord("", "", "", (file_record(model),), fetched=0.0, used=0.0)
        except OSError:
            return  # the file is missing; the code that opens the file will report the error
    write_record(structs.replace(record, used=time.time()))


def remember_digests(
    files: Sequence[Path], digests: Sequence[str], *, name: str, source: str, commit: str = ""
) -> None:
    """Record the digests of a model's files, which have just been hashed.

    An existing record keeps its other fields. `name`, `source` and `commit` are used only if the record has no name.
    """
    known = read_record(files[0]) or ModelRecord(name, source, commit, (), fetched=0.0, used=0.0)
    if not known.name:
        known = structs.replace(known, name=name, source=source, commit=commit)
    with contextlib.suppress(OSError):  # one of the files was deleted
        write_record(structs.replace(known, files=tuple(map(file_record, files, digests))))


def known_digest(path: Path, first: Path | None = None) -> str | None:
    """Return the recorded sha256 of a file, or None if there is no record or the file has changed since hashing.

    The file's contents are not read. The sha256 of a shard is in the record of its model, whose first file is
    `first`, by default the file with the name of the first shard.
    """
    real = os.path.realpath(path)
    first = first or path.with_name(first_shard(path.name))
    for record in map(read_record, dict.fromkeys((path, first))):
        for file in record.files if record else ():
            if file.sha256 and _is_same_file(file, real) and _is_unchanged(file, real):
                return file.sha256
    return None


def _is_same_file(file: FileRecord, real: str) -> bool:
    # A blob's name is its sha256, which identifies the blob even after the recorded snapshot was removed.
    return file.sha256 == os.path.basename(real) or os.path.realpath(file.path) == real  # noqa: PTH119


def _is_unchanged(file: FileRecord, real: str) -> bool:
    try:
        now = file_record(Path(real))
    except OSError:
        return False
    return (now.size, now.modified) == (file.size, file.modified)


def _record(table: Any) -> ModelRecord | None:
    """Convert parsed JSON to a record, checking every type. Returns None if a value is invalid.

    Raises KeyError, TypeError, ValueError or OverflowError if the JSON has an unexpected structure.
    """
    files = tuple(
        FileRecord(_text(file["path"]), _count(file["size"]), _count(file["modified"]), _text(file["sha256"]))
        for file in table["files"]
    )
    if table["version"] != _VERSION or not files:
        return None
    if any(file.sha256 and not SHA256.fullmatch(file.sha256) for file in files):
        return None
    name, source, commit = (_text(table[key]) for key in ("name", "source", "commit"))
    return ModelRecord(name, source, commit, files, _moment(table["fetched"]), _moment(table["used"]))


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _MOST_TEXT:
        raise TypeError(value)
    return value


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise TypeError(value)
    return value


def _moment(value: object) -> float:
    if not isinstance(value, int | float):
        raise TypeError(value)
    moment = float(value)
    if not math.isfinite(moment) or moment < 0:
        raise ValueError(value)
    return moment
