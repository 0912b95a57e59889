"""What llmrun remembers of each model it has fetched, checked or run: one small JSON file a model.

A record says under which name the model was asked for, which files it has, that their sha256 was seen to be right
(and for which size and time of change that holds), and when it was last used. It is a memory, not a truth: a model
without one is read once, and gets one; a record whose file is gone means nothing.

A record belongs to the file itself, links followed: a new snapshot of a repository that links to the same bytes has
the record of the old one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llmrun.hub.local import paths
from llmrun.hub.names.file_names import first_shard

_VERSION = 1
_MOST_BYTES = 1 << 20  # a thousand shards are a quarter of it
_MOST_TEXT = 8192  # characters; a path and a URL may be long
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file as it was at one moment. size and modified (whole seconds) are those of that moment."""

    path: str  # absolute
    size: int
    modified: int
    sha256: str  # "": its bytes were not hashed


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A model on this machine; `files[0]` is the one that is opened."""

    name: str  # as it was asked for: "qwen3:4b", "hf:owner/name:Q5_K_M"; "" when only its path was given
    source: str  # the text of a Source
    commit: str  # of the repository; "" for sources that have none
    files: tuple[FileRecord, ...]
    fetched: float  # seconds since 1970; 0.0: not by llmrun
    used: float  # 0.0: never


def file_record(path: Path, sha256: str = "") -> FileRecord:
    """Of a file as it is now. Whole seconds: archives and container images keep no finer time. Raises OSError."""
    status = path.stat()
    return FileRecord(os.path.abspath(path), status.st_size, int(status.st_mtime), sha256)  # noqa: PTH100


def record_path(model: Path) -> Path:
    """Where the record of this model lies, or would lie."""
    return paths.record_file(Path(os.path.realpath(model)))


def read_record(model: Path) -> ModelRecord | None:
    """Of the model whose first file is at this path; None where there is none, or one that cannot be read."""
    try:
        with record_path(model).open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            return None
        return _record(json.loads(data))
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def write_record(record: ModelRecord) -> None:
    """Put a record in place, in one step. A folder that cannot be written costs a check at the next start, no more."""
    path = record_path(Path(record.files[0].path))
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(json.dumps({"version": _VERSION} | asdict(record)), "utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def mark_used(model: Path) -> None:
    """Remember that the model is being opened now."""
    record = read_record(model)
    if record is None:
        try:
            record = ModelRecord("", "", "", (file_record(model),), fetched=0.0, used=0.0)
        except OSError:
            return  # it is not there: whoever opens it says so
    write_record(replace(record, used=time.time()))


def remember_digests(
    files: Sequence[Path], digests: Sequence[str], *, name: str, source: str, commit: str = ""
) -> None:
    """Remember that these files of a model were hashed just now. What is known of it otherwise stays; its name, source
    and commit are taken where there is no record yet."""
    known = read_record(files[0]) or ModelRecord(name, source, commit, (), fetched=0.0, used=0.0)
    if not known.name:
        known = replace(known, name=name, source=source, commit=commit)
    with contextlib.suppress(OSError):  # one of them has gone
        write_record(replace(known, files=tuple(map(file_record, files, digests))))


def known_digest(path: Path) -> str | None:
    """The sha256 that this file had when it was last hashed, if it was not written to since. No bytes are read.

    A shard's is in the record of its model.
    """
    real = os.path.realpath(path)
    for record in map(read_record, dict.fromkeys((path, path.with_name(first_shard(path.name))))):
        for file in record.files if record else ():
            if file.sha256 and _is_same_file(file, real) and _is_unchanged(file, real):
                return file.sha256
    return None


def _is_same_file(file: FileRecord, real: str) -> bool:
    # A blob is named by its sha256: it is known again when the snapshot that it was found through is gone.
    return file.sha256 == os.path.basename(real) or os.path.realpath(file.path) == real  # noqa: PTH119


def _is_unchanged(file: FileRecord, real: str) -> bool:
    try:
        now = file_record(Path(real))
    except OSError:
        return False
    return (now.size, now.modified) == (file.size, file.modified)


def _record(table: Any) -> ModelRecord | None:
    """From what was read, each value of the type it must have. Raises what a wrong shape raises; None for a value."""
    files = tuple(
        FileRecord(_text(file["path"]), _count(file["size"]), _count(file["modified"]), _text(file["sha256"]))
        for file in table["files"]
    )
    if table["version"] != _VERSION or not files:
        return None
    if any(file.sha256 and not _SHA256.fullmatch(file.sha256) for file in files):
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
