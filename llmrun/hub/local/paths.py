"""Builds the paths of models on this machine, in our own folder and in the cache that all Hugging Face tools share.

Names from a catalogue, a server or the command line are validated with `safe_segments`, so these paths cannot lead
outside their folders. Paths in the cache:

    models--OWNER--NAME/refs/main                     the commit that a branch or a tag last pointed to
    models--OWNER--NAME/snapshots/COMMIT/FILE         a link to its blob, or a regular file if links are not supported
    models--OWNER--NAME/blobs/SHA256                  the contents of a file

Other programs write to these folders too. Unreadable folders are treated as empty.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from llmrun.base.errors import UsageError
from llmrun.base.folders import data_folder
from llmrun.hub.names import COMMIT, SHA256, models_among, safe_segments

_MOST_BYTES = 1 << 20
_MOST_ENTRIES = 100_000


def expanded(text: str) -> Path:
    """Expand `~` and environment variables, and return an absolute path. This function never raises."""
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
    """Read a file of at most 1 MiB. Raises OSError, and ValueError if the file exceeds the limit."""
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{path}: more than {_MOST_BYTES} bytes")
    return data


PARTIAL = ".llmrun.incomplete"  # suffix of partial downloads in the shared cache


def models_folder() -> Path:
    """Return the folder for llmrun's own models and for the records of all models."""
    return data_folder("models")


def own_model(file: str) -> Path:
    """Return the path of a model file in our own folder, which other tools do not use."""
    return models_folder() / _name(file)


def web_file(url: str, file: str) -> Path:
    """Return the path of a file from a web server. Each URL has its own folder, because file names may collide."""
    return models_folder() / "web" / _hashed(url)[:32] / _name(file)


def received_file(sha256: str, file: str) -> Path:
    """Return the path of a file from another machine. Each model has its own folder, named by a sha256."""
    if not SHA256.fullmatch(sha256):
        raise UsageError(f"sha256: {sha256[:100]!r}: not 64 lower-case hexadecimal digits")
    return models_folder() / "received" / sha256 / _name(file)


def single_model_folders() -> list[Path]:
    """Return the subfolders of our own folder that each contain one model, from a URL or from another machine."""
    return [folder for kind in ("web", "received") for folder in folders_in(models_folder() / kind)]


def work_folder(key: str) -> Path:
    """Return the folder for partial downloads of `key` (any text). The next download of `key` empties the folder."""
    return models_folder() / ".partial" / _hashed(key)


def lock_file(key: str) -> Path:
    """Return the path of the lock that processes hold while they download or remove the model `key`."""
    return models_folder() / ".locks" / f"{_hashed(key)}.lock"


def record_file(model: Path) -> Path:
    """Return the path of a model's record (see model_records.py)."""
    return models_folder() / ".records" / f"{_hashed(os.fspath(model))}.json"


def hub_cache() -> Path:
    """Return the path of the cache that all Hugging Face tools share, by huggingface_hub's rules."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if named:
        return expanded(named)
    home = os.environ.get("HF_HOME")
    if home:
        return expanded(home) / "hub"
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def repository_folder(repository: str) -> Path:
    segments = safe_segments(repository)
    if len(segments) != 2 or "--" in repository:  # the Hub forbids "--" because it would make folder names ambiguous
        raise UsageError(f"repository: {repository[:300]!r}: not in the form owner/name")
    return hub_cache() / ("models--" + "--".join(segments))


def blob(repository: str, sha256: str) -> Path:
    """Return the path of a blob in the shared cache. A blob's name is its sha256, and snapshots link to the blob."""
    if not SHA256.fullmatch(sha256):
        raise UsageError(f"sha256: {sha256[:100]!r}: not 64 lower-case hexadecimal digits")
    return repository_folder(repository) / "blobs" / sha256


def partial_of(final: Path) -> Path:
    """Return the path of the partial file that becomes `final` when its download is complete."""
    return final.with_name(final.name + PARTIAL)


def snapshot_file(repository: str, commit: str, file: str) -> Path:
    if not COMMIT.fullmatch(commit):
        raise UsageError(f"commit: {commit[:100]!r}: not 40 lower-case hexadecimal digits")
    return (repository_folder(repository) / "snapshots" / commit).joinpath(*safe_segments(file))


def reference_file(repository: str, revision: str) -> Path:
    """Return the path of the file that records the commit to which a branch or tag last pointed."""
    return (repository_folder(repository) / "refs").joinpath(*safe_segments(revision))


def shared_lock(repository: str, sha256: str) -> Path:
    """Return the path of the lock that huggingface_hub uses for a blob."""
    name = blob(repository, sha256).name
    return hub_cache() / ".locks" / repository_folder(repository).name / f"{name}.lock"


def _name(file: str) -> str:
    """Return `file` unchanged. Raises UsageError unless `file` is a safe file name without folders."""
    if len(safe_segments(file)) != 1:
        raise UsageError(f"file name: {file[:300]!r}: must not contain a folder")
    return file


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether a file is inside a folder after resolving the links in both paths."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
