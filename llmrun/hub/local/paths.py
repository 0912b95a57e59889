"""Builds the paths of models on this machine, including all paths that contain untrusted names.

Names from a catalogue, a server or the command line are validated with `safe_segments`, so these paths cannot lead
outside their folders.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from llmrun.base.errors import UsageError
from llmrun.base.folders import data_folder
from llmrun.hub.local.scandir import expanded, folders_in
from llmrun.hub.names.file_names import safe_segments

PARTIAL = ".llmrun.incomplete"  # suffix of partial downloads in the shared cache
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def models_folder() -> Path:
    """Return the folder for llmrun's own models and for the records of all models."""
    return data_folder() / "models"


def own_model(file: str) -> Path:
    """Return the path of a model file in our own folder, which other tools do not use."""
    return models_folder() / _name(file)


def web_file(url: str, file: str) -> Path:
    """Return the path of a file from a web server. Each URL has its own folder, because file names may collide."""
    return models_folder() / "web" / _hashed(url)[:32] / _name(file)


def received_file(sha256: str, file: str) -> Path:
    """Return the path of a file from another machine. Each model has its own folder, named by a sha256."""
    if not _SHA256.fullmatch(sha256):
        raise UsageError(f"sha256: {sha256[:100]!r}: not 64 lower-case hexadecimal digits")
    return models_folder() / "received" / sha256 / _name(file)


def single_model_folders() -> list[Path]:
    """Return the folders in our own folder that contain one model each: from a URL or from another machine."""
    return [folder for kind in ("web", "received") for folder in folders_in(models_folder() / kind)]


def work_folder(key: str) -> Path:
    """Return the folder for partial downloads of `key` (any text). The next download of the same `key` empties it."""
    return models_folder() / ".partial" / _hashed(key)


def lock_file(key: str) -> Path:
    """Return the path of the lock that processes hold while they download or remove the model `key`."""
    return models_folder() / ".locks" / f"{_hashed(key)}.lock"


def record_file(model: Path) -> Path:
    """Return the path of a model's record (see model_records.py)."""
    return models_folder() / ".records" / f"{_hashed(os.fspath(model))}.json"


def hub_cache() -> Path:
    """Return the cache that all Hugging Face tools share. Follows huggingface_hub's rules without importing it."""
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
    """Return the path of a blob in the shared cache. A blob's name is its sha256, and snapshots link to it."""
    if not _SHA256.fullmatch(sha256):
        raise UsageError(f"sha256: {sha256[:100]!r}: not 64 lower-case hexadecimal digits")
    return repository_folder(repository) / "blobs" / sha256


def partial_blob(repository: str, sha256: str) -> Path:
    return partial_of(blob(repository, sha256))


def partial_of(final: Path) -> Path:
    """Return the path of the partial file that becomes `final` when its download is complete."""
    return final.with_name(final.name + PARTIAL)


def snapshot_file(repository: str, commit: str, file: str) -> Path:
    if not _COMMIT.fullmatch(commit):
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
    """Return `file` unchanged. Raises UsageError unless it is a safe file name without folders."""
    if len(safe_segments(file)) != 1:
        raise UsageError(f"file name: {file[:300]!r}: must not contain a folder")
    return file


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
