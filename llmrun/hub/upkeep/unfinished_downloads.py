"""Downloads that were begun and not ended: what their journals say."""

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
    """What is here of a file that is on its way, or was.

    name   of the repository; by its path, where that is all there is
    files  the half-done file and what lies beside it
    done   bytes that are here
    total  bytes of the whole; 0: not known
    """

    name: str
    files: tuple[Path, ...]
    done: int
    total: int


def partials() -> list[UnfinishedDownload]:
    """Those of ours, in the shared cache and elsewhere; other tools' cannot be gone on with."""
    return [*_shared(), *_own()]


def _shared() -> Iterator[UnfinishedDownload]:
    for repository in folders_in(paths.hub_cache()):
        name, blobs = repository_name(repository.name), repository / "blobs"
        if name and not blobs.is_symlink():
            yield from _in_folder(blobs, f"hf:{name}")


def _own() -> Iterator[UnfinishedDownload]:
    for address in folders_in(paths.models_folder() / "web"):
        yield from _in_folder(address, "")


def _in_folder(folder: Path, name: str) -> Iterator[UnfinishedDownload]:
    files = [Path(entry.path) for entry in entries(folder) if paths.PARTIAL in entry.name and is_file(entry)]
    for path in files:
        if path.name.endswith(paths.PARTIAL) and not path.is_symlink():
            beside = tuple(other for other in files if other.name.startswith(path.name))
            told, done = _journal(path.with_name(path.name + JOURNAL))
            total = told.get("size")
            yield UnfinishedDownload(name or str(path), beside, done, total if type(total) is int and total > 0 else 0)


def _journal(path: Path) -> tuple[dict[str, Any], int]:
    """Its first line, and how many bytes the others say are here; nothing of what is not a journal."""
    try:
        told, runs = understood(read_small(path))
        return told, sum(max(written - start, 0) for start, written, _ in runs)
    except (OSError, ValueError, RecursionError):
        return {}, 0
