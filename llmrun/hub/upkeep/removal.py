"""Removes models from this machine: their links in snapshots, and blobs to which nothing links any more.

Only files in the Hugging Face cache or in our own folder are removed. If a link leads out of these folders, its
target is never removed. Links are removed before their blobs, and references before their snapshots, so that Hugging
Face's own tools consider the cache intact even if the process is killed. The one exception is an entirely empty
repository folder: they need its `snapshots` folder, which is therefore the last to go.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.hub.local import hub_cache, lm_studio, ollama
from llmrun.hub.local import paths as places
from llmrun.hub.local.hub_cache import Repository, is_inside, read_repository
from llmrun.hub.local.model_records import record_path
from llmrun.hub.local.open_models import alone_with
from llmrun.hub.names.file_names import shards_of
from llmrun.hub.names.model_sources import HubSource
from llmrun.hub.upkeep.inventory import OWN, SHARED, Model, total_size
from llmrun.hub.upkeep.unfinished_downloads import UnfinishedDownload


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
    """Return the files to remove for a model.

    Raises UsageError if another program owns the model, and LlmrunError if one of the repository's folders is a link,
    because the link's target may not belong to the cache.
    """
    if model.holder == OWN:
        return Removal(model.name, None, model.files, (), (record_path(model.path),))
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
    return removal_of_links(model.name, repository, links)


def removal_of_links(name: str, repository: Repository, links: Sequence[Path]) -> Removal:
    """Return the files to remove with these links. Raises LlmrunError if a folder of the repository is a link."""
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

    Raises LlmrunError if the model is in use or is being downloaded, or if a file cannot be removed. A partly removed
    model never looks complete.
    """
    # Each file is locked once even if several links lead to it, because a second lock would conflict with the first.
    files = dict.fromkeys(os.path.realpath(path) for path in (*removal.links, *removal.blobs))
    with alone_with(map(Path, files)) as busy, _not_being_downloaded(removal) as lock:
        if busy is not None or lock is not None:
            what = "is being downloaded" if busy is None else "is in use"
            raise LlmrunError(f"{removal.name}: {what}: nothing was removed", hint="stop the other llmrun first")
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
    with contextlib.suppress(OSError):  # a record whose model is gone does no harm
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

    Meanwhile, no Hugging Face tool can download these files. If another process holds one of the locks, yields that
    lock's path instead.
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
                continue  # the lock belongs to another user
        yield busy


def _locks(removal: Removal) -> set[Path]:
    """Return a removal's existing lock files as a set, because a partial file and its journal share a lock."""
    locks = set()
    for path in (*removal.links, *removal.blobs):
        name = hub_cache.repository_name(path.parent.parent.name) if path.parent.name == "blobs" else ""
        if name:
            with contextlib.suppress(UsageError):  # the file name is not that of a blob
                locks.add(places.shared_lock(name, path.name[:64]))
    if removal.repository is not None:
        locks.add(places.lock_file(removal.repository.name))  # `pull` holds this lock while it creates links
    return {lock for lock in locks if lock.exists()}


def _how_they_remove(model: Model) -> str:
    name = model.name.partition(":")[2]
    return {ollama.HOLDER: f"ollama rm {name}", lm_studio.HOLDER: "remove it in LM Studio, under My Models"}[
        model.holder
    ]
