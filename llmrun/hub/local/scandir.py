"""Looking into folders that others fill: what cannot be read is not there."""

from __future__ import annotations

import os
from pathlib import Path

from llmrun.hub.names.file_names import models_among

_MOST_BYTES = 1 << 20
_MOST_ENTRIES = 100_000


def expanded(text: str) -> Path:
    """A folder that a user named: `~` and variables replaced, absolute. Never raises."""
    return Path(os.path.expandvars(os.path.expanduser(text))).absolute()  # noqa: PTH111


def entries(folder: Path) -> list[os.DirEntry[str]]:
    """What a folder holds, by name; nothing for one that is not there or cannot be read."""
    try:
        with os.scandir(folder) as found:
            some = [entry for entry, _ in zip(found, range(_MOST_ENTRIES), strict=False)]
    except OSError:
        return []
    return sorted(some, key=lambda entry: entry.name)


def folders_in(folder: Path) -> list[Path]:
    """Real folders: what is behind a link is somebody else's."""
    if folder.is_symlink():
        return []
    return [Path(entry.path) for entry in entries(folder) if entry.is_dir(follow_symlinks=False)]


def is_file(entry: os.DirEntry[str]) -> bool:
    """Whether a file is there, at the end of a link too."""
    try:
        return entry.is_file()
    except OSError:
        return False


def model_files(first: Path) -> tuple[Path, ...]:
    """All files of the model that begins with this one, beside it; itself alone where some are missing."""
    siblings = models_among([entry.name for entry in entries(first.parent)])
    return tuple(first.with_name(name) for name in siblings.get(first.name, (first.name,)))


def read_small(path: Path) -> bytes:
    """A file of at most a megabyte. Raises OSError, and ValueError for a larger one."""
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{path}: more than {_MOST_BYTES} bytes")
    return data
