"""Finds files to prune: superseded models in the Hugging Face cache, and abandoned downloads.

A file in a snapshot is superseded if no branch or tag points to the snapshot any more, and the same file name exists in
a snapshot to which a branch or tag does point. Repositories without a GGUF model belong to other tools and are left
alone unless the user names them.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from llmrun.base.errors import LlmrunError
from llmrun.hub.local import paths
from llmrun.hub.local.hub_cache import Repository, read_repository, repositories
from llmrun.hub.local.scandir import entries
from llmrun.hub.transfer.partial_file import JOURNAL
from llmrun.hub.upkeep.removal import Removal, files_below, referenced, removal_of_links
from llmrun.hub.upkeep.unfinished_downloads import UnfinishedDownload, partials

_BLOB = re.compile(r"[0-9a-f]{64}")
_MAGIC = b"GGUF"
STALE_DAYS = 7  # age in days at which a partial download counts as abandoned


def prunings(named: Collection[str] = ()) -> Iterator[Removal | LlmrunError]:
    """Yield a removal for each repository with files to prune, and for each stale download outside the cache.

    For a repository that cannot be pruned, yields the error instead.

    named  the repositories to prune, such as "owner/name", regardless of contents; () for all GGUF repositories
    """
    chosen = [read_repository(name) for name in named] if named else [each for each in repositories() if _is_ours(each)]
    for repository in chosen:
        try:
            found = _pruning_of(repository, of_any_kind=bool(named))
        except LlmrunError as error:
            yield error
            continue
        if found.links or found.blobs:
            yield found
    if not named:
        yield from _stale_downloads()


def superseded(repository: Repository) -> list[Path]:
    """Return the files in old snapshots that also exist in a current snapshot under the same name."""
    current = set(repository.refs.values()) & set(repository.snapshots)
    if not current:
        return []
    folder = repository.folder / "snapshots"
    present = {
        path.relative_to(folder / commit)
        for commit in current
        for path in files_below(folder / commit)
        if path.exists()
    }
    old = (commit for commit in repository.snapshots if commit not in current)
    return [
        path for commit in old for path in files_below(folder / commit) if path.relative_to(folder / commit) in present
    ]


def _is_ours(repository: Repository) -> bool:
    """Return whether a repository contains a GGUF model or an old GGUF blob without links."""
    return any(repository.snapshots.values()) or bool(_orphans(repository, of_any_kind=False))


def _pruning_of(repository: Repository, *, of_any_kind: bool) -> Removal:
    found = removal_of_links(f"hf:{repository.name}", repository, superseded(repository))
    left = [*_orphans(repository, of_any_kind=of_any_kind), *_dead_partials(repository)]
    return replace(found, blobs=(*found.blobs, *(path for path in left if path not in found.blobs)))


def _orphans(repository: Repository, *, of_any_kind: bool) -> list[Path]:
    """Return the old blobs to which no snapshot links, left by processes that died while adding or removing blobs.

    Blobs younger than STALE_DAYS are left out because they may be the first shards of a download in progress.
    """
    blobs = [entry for entry in entries(repository.folder / "blobs") if entry.is_file(follow_symlinks=False)]
    kept = referenced(repository)
    return [
        path
        for entry in blobs
        if _BLOB.fullmatch(entry.name) and Path(os.path.realpath(path := Path(entry.path))) not in kept
        if _is_old(path) and (of_any_kind or _begins_with_magic(path))
    ]


def _dead_partials(repository: Repository) -> Iterator[Path]:
    """Yield the files of partial downloads that are stale, cannot be resumed or have a finished blob."""
    for partial in partials():
        path = partial.files[0]
        if path.parent == repository.folder / "blobs" and (
            path.with_name(path.name.removesuffix(paths.PARTIAL)).exists() or _is_stale(partial)
        ):
            yield from partial.files


def _stale_downloads() -> Iterator[Removal]:
    for partial in partials():
        if partial.files[0].is_relative_to(paths.models_folder()) and _is_stale(partial):
            yield Removal(f"download of {partial.name}", None, partial.files, ())


def _is_stale(partial: UnfinishedDownload) -> bool:
    path = partial.files[0]
    return path.with_name(path.name + JOURNAL) not in partial.files or all(map(_is_old, partial.files))


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > STALE_DAYS * 86_400
    except OSError:
        return False  # the file was deleted in the meantime


def _begins_with_magic(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False
