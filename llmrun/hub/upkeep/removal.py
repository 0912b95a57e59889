"""Removes models, superseded files and abandoned downloads from this machine.

Only files in the Hugging Face cache or in our own folder are removed. If a link leads out of these folders, its target
is never removed. Links are removed before their blobs, and references before their snapshots, so that Hugging Face's
own tools consider the cache intact even if the process is killed. The only exception is an entirely empty repository
folder: Hugging Face's tools need a repository's `snapshots` folder, which is therefore removed last.

A file in a snapshot is superseded if no branch or tag points to the snapshot any more, and the same file name exists in
a snapshot to which a branch or tag does point. Repositories without a GGUF model belong to other tools and are left
alone.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.hub.local import paths
from llmrun.hub.local import paths as places
from llmrun.hub.local.model_records import record_path
from llmrun.hub.local.other_programs import LM_STUDIO, OLLAMA
from llmrun.hub.local.paths import entries, folders_in, is_file, is_inside, read_small
from llmrun.hub.local.projectors import only_projectors_of
from llmrun.hub.local.safe_writes import alone_with
from llmrun.hub.local.stored_models import Repository, read_repository, repositories, repository_name
from llmrun.hub.names import SHA256, HubSource, is_gguf, shards_of
from llmrun.hub.projector_names import only_of
from llmrun.hub.transfer.partial_file import JOURNAL, understood
from llmrun.hub.upkeep.inventory import OWN, SHARED, Model, total_size


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
    """Return a journal's header, or an empty header if the journal is invalid, and the number of bytes on disk."""
    try:
        told, runs = understood(read_small(path))
        return told, sum(max(written - start, 0) for start, written, _ in runs)
    except (OSError, ValueError, RecursionError):
        return {}, 0


@dataclass(frozen=True, slots=True)
class Removal:
    """The files to remove with a model or a download.

    name        the model or download to which the files belong
    repository  the files' repository in the Hugging Face cache; None for files elsewhere
    links       links in snapshots, or regular files if links are not supported
    blobs       blobs to which nothing else links
    records     llmrun's records of the models
    notes       messages about files that are kept, with the reason
    """

    name: str
    repository: Repository | None
    links: tuple[Path, ...]
    blobs: tuple[Path, ...]
    records: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def freed(self) -> int:
        """The number of bytes that the removal frees on disk."""
        return total_size(path for path in (*self.links, *self.blobs) if not path.is_symlink())


def removal_of(model: Model) -> Removal:
    """Return the files to remove for a model, including its projector, unless another model nearby uses the projector.

    Raises UsageError if another program owns the model, and LlmrunError if one of the repository's folders is a link,
    because the link's target may not belong to the cache.
    """
    if model.holder == OWN:
        return removal_of_own(model.name, model.files)
    if model.holder != SHARED:
        raise UsageError(
            f"{model.name}: llmrun does not remove other programs' models: {model.path}", hint=_how_they_remove(model)
        )
    assert isinstance(model.source, HubSource)
    assert model.source.file is not None
    repository = read_repository(model.source.repository)
    refuse_linked_folders(repository)
    files = shards_of(model.source.file)
    links = [
        link
        for commit in model.commits
        for file in files
        if (link := repository.snapshots.get(commit, {}).get(file)) is not None  # a concurrent `rm` may have removed it
    ]
    left = {name: path for snapshot in repository.snapshots.values() for name, path in snapshot.items()}
    kept = {name for snapshot in repository.snapshots.values() for name, path in snapshot.items() if path not in links}
    if files[0] not in kept:  # otherwise, another revision of this model stays
        projectors = set(only_of(files[0], left))
        links += [path for one in repository.snapshots.values() for name, path in one.items() if name in projectors]
    return removal_of_links(model.name, repository, links)


def removal_of_own(name: str, files: tuple[Path, ...]) -> Removal:
    """Return the files to remove for a model in our own folder, which may be links to missing files.

    A projector is removed along with its model, unless another model in the folder uses it. The record of a linked file
    belongs to the file.
    """
    files += only_projectors_of(files[0])
    targets = [os.path.realpath(path) for path in files if path.is_symlink() and path.exists()]
    links, verb = ("the link is", "is") if len(targets) == 1 else ("links are", "are")
    notes = (f"{name}: only {links} removed; {' and '.join(targets)} {verb} kept",) if targets else ()
    records = tuple(record_path(path) for path in files if not path.is_symlink())
    return Removal(name, None, files, (), records, notes)


def removal_of_links(name: str, repository: Repository, links: Sequence[Path]) -> Removal:
    """Return the files to remove along with these links. Raises LlmrunError if a folder of the repository is a link."""
    refuse_linked_folders(repository)
    blobs, notes = [], []
    for link in links:
        if not link.is_symlink():
            continue
        blob = Path(os.path.realpath(link))
        if blob.parent == Path(os.path.realpath(repository.folder / "blobs")):
            blobs.append(blob)
        elif not is_inside(link, repository.folder):
            notes.append(f"{link}: only the link is removed; its target {blob} is outside the cache and is kept")
    kept = referenced(repository, except_for=frozenset(links))
    free = tuple(dict.fromkeys(blob for blob in blobs if blob not in kept))
    records = [record_path(link) for link in links if not link.is_symlink() or Path(os.path.realpath(link)) in free]
    return Removal(name, repository, tuple(links), free, tuple(dict.fromkeys(records)), tuple(notes))


def removal_of_partial(partial: UnfinishedDownload) -> Removal:
    """Return the files to remove when discarding an unfinished download."""
    return Removal(partial.name, None, partial.files, ())


def remove(removal: Removal) -> int:
    """Remove the files and return the number of bytes freed.

    Raises LlmrunError if the model is in use or is being downloaded, or if a file cannot be removed. A partially
    removed model never looks complete.
    """
    # Each file is locked once even if several links lead to it, because a second lock would conflict with the first.
    files = dict.fromkeys(os.path.realpath(path) for path in (*removal.links, *removal.blobs))
    with alone_with(map(Path, files)) as busy, _not_being_downloaded(removal) as lock:
        if busy is not None or lock is not None:
            what = "is being downloaded" if busy is None else "is in use"
            raise LlmrunError(f"{removal.name}: {what}: nothing was removed", hint="stop the other process")
        freed = removal.freed
        try:
            _unlink(removal.links)
            _unlink(removal.blobs)
        except OSError as error:
            raise LlmrunError(
                f"{removal.name}: {error.filename}: cannot be removed: {error.strerror}",
                hint="check the file's owner and permissions",
            ) from error
        finally:
            if removal.repository is not None:
                tidy(removal.repository)
    with contextlib.suppress(OSError):  # a record of a removed model does no harm
        _unlink(removal.records)
    return freed


def refuse_linked_folders(repository: Repository) -> None:
    """Raise LlmrunError if one of a repository's folders is a link, because removal would follow it."""
    for folder in (repository.folder, *(repository.folder / name for name in ("snapshots", "blobs", "refs"))):
        if folder.is_symlink():
            raise LlmrunError(f"{folder}: this folder is a link, so nothing in it is removed")


def referenced(repository: Repository, *, except_for: frozenset[Path] = frozenset()) -> set[Path]:
    """Return the targets of all links in all snapshots, including links to files other than GGUF models."""
    return {
        Path(os.path.realpath(path)) for path in files_below(repository.folder / "snapshots") if path not in except_for
    }


def tidy(repository: Repository) -> None:
    """Remove empty folders, and references to snapshots without files."""
    with contextlib.suppress(OSError):  # files may belong to another user; empty folders do no harm
        empty = {commit for commit in repository.snapshots if not _has_files(_snapshots(repository) / commit)}
        for revision, commit in repository.refs.items():
            if commit in empty:
                (repository.folder / "refs").joinpath(*revision.split("/")).unlink(missing_ok=True)
        for commit in sorted(empty):
            _remove_empty_folders(_snapshots(repository) / commit)
        if not _has_files(_snapshots(repository)) and not _has_files(repository.folder / "blobs"):
            _unlink(files_below(repository.folder / ".no_exist"))  # markers for files that do not exist on the Hub
            _unlink(files_below(repository.folder / "refs"))
            for folder in sorted(repository.folder.iterdir(), key=lambda folder: folder.name == "snapshots"):
                _remove_empty_folders(folder)
            repository.folder.rmdir()


def _snapshots(repository: Repository) -> Path:
    return repository.folder / "snapshots"


def files_below(folder: Path) -> Iterator[Path]:
    """Yield all files and links below a folder. Linked folders are yielded but not entered."""
    for above, folders, files in os.walk(folder):
        yield from (Path(above, name) for name in files)
        yield from (path for name in folders if (path := Path(above, name)).is_symlink())


def _has_files(folder: Path) -> bool:
    return next(files_below(folder), None) is not None


def _remove_empty_folders(folder: Path) -> None:
    for above, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):  # the folder is not empty
            os.rmdir(above)  # noqa: PTH106


def _unlink(paths: Iterable[Path]) -> None:
    for path in list(paths):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _not_being_downloaded(removal: Removal) -> Iterator[Path | None]:
    """Hold the download locks of the files to remove while the block runs. Yields None on success.

    While the locks are held, no Hugging Face tool can download these files. If another process holds one of the locks,
    yields that lock's path instead.
    """
    import filelock

    with contextlib.ExitStack() as held:
        busy = None
        for lock in sorted(_locks(removal)):
            try:
                held.enter_context(filelock.FileLock(lock, timeout=0))
            except filelock.Timeout:
                busy = lock
            except OSError:
                continue  # this lock file belongs to another user
        yield busy


def _locks(removal: Removal) -> set[Path]:
    """Return a removal's existing lock files as a set, because a partial file and its journal share a lock."""
    locks = set()
    for path in (*removal.links, *removal.blobs):
        name = repository_name(path.parent.parent.name) if path.parent.name == "blobs" else ""
        if name:
            with contextlib.suppress(UsageError):  # the file name is not a blob's name
                locks.add(places.shared_lock(name, path.name[:64]))
    if removal.repository is not None:
        locks.add(places.lock_file(removal.repository.name))  # `pull` holds this lock while it creates links
    return {lock for lock in locks if lock.exists()}


def _how_they_remove(model: Model) -> str:
    name = model.name.partition(":")[2]
    return {OLLAMA: f"ollama rm {name}", LM_STUDIO: "remove the model in LM Studio, under My Models"}[model.holder]


STALE_DAYS = 7  # age in days at which a partial download counts as abandoned


def prunings() -> Iterator[Removal | LlmrunError]:
    """Yield a removal for each repository with files to prune, and for stale downloads and imports outside the cache.

    For a repository that cannot be pruned, yields the error instead.
    """
    for repository in repositories():
        try:
            orphans = _orphans(repository)
            if any(repository.snapshots.values()) or orphans:
                found = removal_of_links(f"hf:{repository.name}", repository, superseded(repository))
                blobs = tuple(dict.fromkeys((*found.blobs, *orphans, *_dead_partials(repository))))
                if found.links or blobs:
                    yield replace(found, blobs=blobs)
        except LlmrunError as error:
            yield error
    for partial in partials():
        if partial.files[0].is_relative_to(paths.models_folder()) and _is_stale(partial):
            yield Removal(f"download of {partial.name}", None, partial.files, ())
    for work in folders_in(paths.work_folder("").parent):  # left by a killed import, or a killed download from PyPI
        files = tuple(files_below(work))
        if files and all(map(_is_old, files)):
            yield Removal(f"unfinished files in {work}", None, files, ())


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


def _orphans(repository: Repository) -> list[Path]:
    """Return the old GGUF blobs to which no snapshot links, left by processes that died while adding or removing blobs.

    Blobs younger than STALE_DAYS are left out because they may be the first shards of a download in progress.
    """
    blobs = [entry for entry in entries(repository.folder / "blobs") if entry.is_file(follow_symlinks=False)]
    kept = referenced(repository)
    return [
        path
        for entry in blobs
        if SHA256.fullmatch(entry.name) and Path(os.path.realpath(path := Path(entry.path))) not in kept
        if _is_old(path) and is_gguf(path)
    ]


def _dead_partials(repository: Repository) -> Iterator[Path]:
    """Yield the files of partial downloads that are stale, cannot be resumed or have a finished blob."""
    for partial in partials():
        path = partial.files[0]
        if path.parent == repository.folder / "blobs" and (
            path.with_name(path.name.removesuffix(paths.PARTIAL)).exists() or _is_stale(partial)
        ):
            yield from partial.files


def _is_stale(partial: UnfinishedDownload) -> bool:
    path = partial.files[0]
    return path.with_name(path.name + JOURNAL) not in partial.files or all(map(_is_old, partial.files))


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > STALE_DAYS * 86_400
    except OSError:
        return False  # another process deleted the file in the meantime
