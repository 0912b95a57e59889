"""Reads folders that other programs write to. Unreadable folders are treated as empty."""

from __future__ import annotations

import os
from pathlib import Path

from llmrun.hub.names.file_names import models_among

_MOST_BYTES = 1 << 20
_MOST_ENTRIES = 100_000


def expanded(text: str) -> Path:
    """Expand `~` and environment variables, and return an absolute path. Never raises."""
    return Path(os.path.expandvars(os.path.expanduser(text))).absolute()  # noqa: PTH111


def entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder, sorted by name. Returns [] for a missing or unreadable folder."""
    try:
        with os.scandir(folder) as found:
            some = [entry for entry, _ in zip(found, range(_MOST_ENTRIES), strict=False)]
    except OSError:
        return []
    return sorted(some, key=lambda entry: entry.name)


def folders_in(folder: Path) -> list[Path]:
    """Return the folders inside a folder. Links are skipped because they may lead anywhere."""
    if folder.is_symlink():
        return []
    return [Path(entry.path) for entry in entries(folder) if entry.is_dir(follow_symlinks=False)]


def is_file(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a file or a link to a file."""
    try:
        return entry.is_file()
    except OSError:
        return False


def model_files(first: Path) -> tuple[Path, ...]:
    """Return all files of the model whose first file is `first`, or only `first` if a shard is missing."""
    siblings = models_among([entry.name for entry in entries(first.parent)])
    return tuple(first.with_name(name) for name in siblings.get(first.name, (first.name,)))


def read_small(path: Path) -> bytes:
    """Read a file of at most 1 MiB. Raises OSError, or ValueError if it is larger."""
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{path}: more than {_MOST_BYTES} bytes")
    return data
