"""The history of saved runs on this machine, stored as one line of JSON per run."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmrun.base.amounts import counted
from llmrun.base.errors import LlmrunError, UsageError
from llmrun.base.folders import data_folder
from llmrun.jobs.bench.documents.document import Document, from_json, parse, to_json

_FROM_THE_END = re.compile(r"last(?:~([0-9]{1,9}))?")


@dataclass(frozen=True, slots=True)
class History:
    """The saved runs, oldest first. `damaged` is the number of lines that could not be read."""

    documents: tuple[Document, ...]
    damaged: int = 0


def history_file() -> Path:
    """Return the path of the history file."""
    return data_folder("bench") / "history.jsonl"


def save(document: Document) -> None:
    """Append one run and sync it to disk. Other processes may save runs at the same time.

    If writing fails, the file is left unchanged and LlmrunError is raised.
    """
    import filelock

    line = json.dumps(to_json(document), separators=(",", ":"), allow_nan=False).encode() + b"\n"
    path = history_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path.with_name(".history.lock")):
            _append(path, line)
    except (OSError, NotImplementedError) as error:  # NotImplementedError: the file system does not support locks.
        is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        why = "the disk is full" if is_full else getattr(error, "strerror", None) or str(error)
        raise LlmrunError(
            f"history: {path}: cannot be written: {why}",
            hint="free some disk space" if is_full else "set LLMRUN_DATA_DIR to a writable folder",
        ) from error


def _append(path: Path, line: bytes) -> None:
    with path.open("ab+", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        if file.read(1) not in (b"", b"\n"):
            line = b"\n" + line  # Start a new line, because a killed process left an incomplete line.
        try:
            written = 0
            while written < len(line):
                written += file.write(line[written:]) or 0
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):  # If truncating fails too, readers skip the incomplete line.
                file.truncate(end)
            raise


def load_history() -> History:
    """Load all saved runs. Damaged lines and lines that a newer version of llmrun wrote are skipped and counted.

    Raises LlmrunError if the file exists but cannot be read.
    """
    path = history_file()
    documents, damaged = [], 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    where = f"history: {path}: line {number}"
                    documents.append(from_json(parse(line.decode("utf-8"), where), where))
                except (UsageError, UnicodeDecodeError):
                    damaged += bool(line.strip())
    except FileNotFoundError:
        return History(())
    except OSError as error:
        raise LlmrunError(f"history: {path}: cannot be read: {error.strerror or error}") from error
    return History(tuple(documents), damaged)


def find(reference: str, documents: Sequence[Document]) -> Document:
    """Return the run that `reference` names: its ID, a unique prefix of the ID, `last`, or `last~N` (N runs earlier).

    Raises UsageError.
    """
    if not documents:
        raise UsageError(f"history: {reference!r}: no runs are saved", hint="save a run with `llmrun bench --save`")
    match = _FROM_THE_END.fullmatch(reference)
    if match:
        back = int(match[1] or 0)
        if back >= len(documents):
            raise UsageError(f"history: {reference}: only {counted(len(documents), 'run')} saved")
        return documents[-1 - back]
    # If two runs have the same ID, the later run wins.
    by_identity = {document.identity: document for document in documents}
    if reference in by_identity:
        return by_identity[reference]
    found = [identity for identity in by_identity if reference and identity.startswith(reference)]
    if len(found) == 1:
        return by_identity[found[0]]
    recent = ", ".join(list(by_identity)[-3:])
    if not found:
        raise UsageError(f"history: {reference!r}: no such run", hint=f"the most recent runs: {recent}")
    raise UsageError(f"history: {reference!r}: matches {len(found)} runs: {', '.join(found[-3:])}")
