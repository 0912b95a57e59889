"""Where models lie on this machine, and which of them are known to be whole.

Two places are looked at: llmrun's own data folder (`models/`) and the cache that all Hugging Face tools share. A file
is trusted when its size is right and its sha256 was seen to be right once: the record of that, in
`models/.verified/`, spares the next start the reading of gigabytes. A file that another tool downloaded has no record
and is read once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.settings import data_folder

if TYPE_CHECKING:
    from llmrun.hub.catalog import CatalogEntry, HubSource
    from llmrun.hub.reporter import Reporter

CHUNK = 1 << 20  # bytes read, hashed and written at a time
PARTIAL = ".llmrun.incomplete"  # suffix of a file on its way into the shared cache


def models_folder() -> Path:
    return data_folder() / "models"


def model_path(entry: CatalogEntry) -> Path:
    """Where a file that is not shared with other tools goes."""
    return models_folder() / entry.file


def workspace(entry: CatalogEntry) -> Path:
    """A folder for half-done work on this model; swept before the next download."""
    return models_folder() / ".partial" / entry.sha256


def hub_cache() -> Path:
    """The cache shared by all Hugging Face tools, found as huggingface_hub finds it but without importing it."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if named:
        return _expanded(named)
    home = os.environ.get("HF_HOME")
    if home:
        return _expanded(home) / "hub"
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def _expanded(text: str) -> Path:
    return Path(os.path.expandvars(os.path.expanduser(text))).absolute()  # noqa: PTH111 (never raises, unlike Path's)


def repository_folder(source: HubSource) -> Path:
    return hub_cache() / ("models--" + source.repository.replace("/", "--"))


def blob_path(source: HubSource, sha256: str) -> Path:
    """The file itself: named by its sha256, linked to from the snapshots that hold it."""
    return repository_folder(source) / "blobs" / sha256


def find(entry: CatalogEntry, reporter: Reporter) -> Path | None:
    """The model's file, if a whole one is here. No network; nothing is hashed that was hashed before."""
    for path in candidates(entry):
        if _recorded(entry, path):
            return path
        try:
            seen = digest(path, reporter, f"checking {entry.name}")
        except OSError as error:
            reporter.note(f"{path}: cannot be read: {error.strerror}; not used")
            continue
        if seen == entry.sha256:
            record(entry, path)
            return path
        reporter.note(f"{path}: damaged: sha256 {seen}, expected {entry.sha256}; not used")
        if path == model_path(entry):
            with contextlib.suppress(OSError):  # ours, and of no use; on a read-only disk it stays
                path.unlink()
    return None


def candidates(entry: CatalogEntry) -> Iterator[Path]:
    """Files of the right name and size, our own folder first."""
    from llmrun.hub.catalog import HubSource

    paths = [model_path(entry)]
    for source in entry.sources:
        if isinstance(source, HubSource):
            paths += sorted(repository_folder(source).glob(f"snapshots/*/{source.file}"))
    for path in paths:
        with contextlib.suppress(OSError):  # not there, or a link to nothing: not a candidate
            if path.stat().st_size == entry.size and path.is_file():
                yield path


def _record_file(entry: CatalogEntry) -> Path:
    return models_folder() / ".verified" / entry.sha256


def _fingerprint(path: Path) -> str:
    """What would change if the file did. Whole seconds: archives and container images keep no finer time."""
    status = path.stat()
    return f"{status.st_size} {int(status.st_mtime)} {path}\n"


def _recorded(entry: CatalogEntry, path: Path) -> bool:
    try:
        return _record_file(entry).read_text("utf-8") == _fingerprint(path)
    except (OSError, UnicodeDecodeError):
        return False


def record(entry: CatalogEntry, path: Path) -> None:
    """Remember that this file has the sha256 of its entry."""
    with contextlib.suppress(OSError):  # a folder that cannot be written costs a check at every start, no more
        file = _record_file(entry)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_fingerprint(path), "utf-8")


def digest(path: Path, reporter: Reporter, label: str) -> str:
    """The sha256 of a file, in hexadecimal."""
    import hashlib

    state, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            state.update(chunk)
            done += len(chunk)
            reporter.progress(label, done, max(done, total))
    return state.hexdigest()


def sweep(entry: CatalogEntry) -> None:
    """Remove what a killed download of this model left behind. The caller holds the model's lock."""
    from llmrun.hub.catalog import HubSource

    shutil.rmtree(workspace(entry), ignore_errors=True)
    for source in entry.sources:
        if isinstance(source, HubSource):
            with contextlib.suppress(OSError):  # another user's, or on a read-only disk: not in our way
                partial_blob(source, entry.sha256).unlink(missing_ok=True)


def partial_blob(source: HubSource, sha256: str) -> Path:
    blob = blob_path(source, sha256)
    return blob.with_name(blob.name + PARTIAL)


@contextlib.contextmanager
def locked(entry: CatalogEntry, reporter: Reporter) -> Iterator[None]:
    """Hold the model's lock, so that one process at a time downloads it. The system frees it if the holder dies."""
    import filelock

    from llmrun.hub.transfer import writing

    path = models_folder() / ".locks" / f"{entry.sha256}.lock"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            reporter.note(f"{entry.name}: another process is downloading it; waiting")
            lock.acquire()
    try:
        yield
    finally:
        lock.release()
