"""What llmrun remembers of each model it has fetched, checked or run: one small JSON file a model.

A record says under which name the model was asked for, which files it has, that their sha256 was seen to be right
(and for which size and time of change that holds), and when it was last used. It is a memory, not a truth: a model
without one is read once, and gets one; a record whose file is gone means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file whose bytes were hashed. size and modified (whole seconds) are those of that moment."""

    path: str  # absolute
    size: int
    modified: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Record:
    """A model on this machine; `files[0]` is the one that is opened."""

    name: str  # as it was asked for: "qwen3:4b", "hf:owner/name:Q5_K_M"
    source: str  # the text of a Source
    commit: str  # of the repository; "" for sources that have none
    files: tuple[FileRecord, ...]
    fetched: float  # seconds since 1970
    used: float  # 0.0: never


def read_record(model: Path) -> Record | None:
    """Of the model whose first file is at this path; None where there is none, or one that cannot be read."""
    raise NotImplementedError


def write_record(record: Record) -> None:
    """Put a record in place, in one step. A folder that cannot be written costs a check at the next start, no more."""
    raise NotImplementedError


def mark_used(model: Path) -> None:
    """Remember that the model is being opened now."""
    raise NotImplementedError


def known_digest(path: Path) -> str | None:
    """The sha256 that this file had when it was last hashed, if it was not written to since. No bytes are read."""
    raise NotImplementedError
