"""Finds unfinished downloads and reads their progress from their journals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmrun.hub.local import paths
from llmrun.hub.local.hub_cache import repository_name
from llmrun.hub.local.scandir import entries, folders_in, is_file, read_small
from llmrun.hub.transfer.partial_file import JOURNAL, understood


@dataclass(frozen=True, slots=True)
class UnfinishedDownload:
    """A file whose download is in progress or was interrupted.

    name   the repository, such as `hf:owner/name`; for files outside the Hugging Face cache, the path
    files  the partial file, its journal and other files whose names begin with its name
    done   the number of bytes on disk
    total  the size of the complete file in bytes; 0 if unknown
    """

    name: str
    files: tuple[Path, ...]
    done: int
    total: int


def partials() -> list[UnfinishedDownload]:
    """Return llmrun's unfinished downloads, in the Hugging Face cache and in our own folder.

    Other tools' downloads are left out because llmrun cannot resume them.
    """
    return [*_shared(), *_own()]


def _shared() -> Iterator[UnfinishedDownload]:
    for repository in folders_in(paths.hub_cache()):
        name, blobs = repository_name(repository.name), repository / "blobs"
        if name and not blobs.is_symlink():
            yield from _in_folder(blobs, f"hf:{name}")


def _own() -> Iterator[UnfinishedDownload]:
    for folder in paths.single_model_folders():
        yield from _in_folder(folder, "")


def _in_folder(folder: Path, name: str) -> Iterator[UnfinishedDownload]:
    files = [Path(entry.path) for entry in entries(folder) if paths.PARTIAL in entry.name and is_file(entry)]
    for path in files:
        if path.name.endswith(paths.PARTIAL) and not path.is_symlink():
            beside = tuple(other for other in files if other.name.startswith(path.name))
            told, done = _journal(path.with_name(path.name + JOURNAL))
            total = told.get("size")
            yield UnfinishedDownload(name or str(path), beside, done, total if type(total) is int and total > 0 else 0)


def _journal(path: Path) -> tuple[dict[str, Any], int]:
    """Read a journal. Returns its header and the number of bytes on disk, or an empty header if it is invalid."""
    try:
        told, runs = understood(read_small(path))
        return told, sum(max(written - start, 0) for start, written, _ in runs)
    except (OSError, ValueError, RecursionError):
        return {}, 0
