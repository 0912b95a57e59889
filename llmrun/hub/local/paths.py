"""Where models lie on this machine: every path that is built from a name that somebody else chose is built here.

A name from a catalogue, a server or a command line goes through `safe_segments` first: no path built here leaves the
folder it belongs to.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from llmrun.errors import UsageError
from llmrun.folders import data_folder
from llmrun.hub.local.scandir import expanded
from llmrun.hub.names.file_names import safe_segments

PARTIAL = ".llmrun.incomplete"  # suffix of a file on its way into the shared cache
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def models_folder() -> Path:
    """llmrun's own models, and what it remembers of those elsewhere."""
    return data_folder() / "models"


def own_model(file: str) -> Path:
    """A file that is not shared with other tools."""
    return models_folder() / _name(file)


def web_file(url: str, file: str) -> Path:
    """A file that a web server has. Each address has a folder: two may end in the same name."""
    return models_folder() / "web" / _hashed(url)[:32] / _name(file)


def work_folder(key: str) -> Path:
    """For half-done work; swept before the next download. `key` is any text: it is hashed."""
    return models_folder() / ".partial" / _hashed(key)


def lock_file(key: str) -> Path:
    """Held by the process that downloads or removes what `key` names."""
    return models_folder() / ".locks" / f"{_hashed(key)}.lock"


def record_file(model: Path) -> Path:
    """What llmrun remembers of the model at this path (model_records.py)."""
    return models_folder() / ".records" / f"{_hashed(os.fspath(model))}.json"


def hub_cache() -> Path:
    """The cache shared by all Hugging Face tools, found as huggingface_hub finds it but without importing it."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if named:
        return expanded(named)
    home = os.environ.get("HF_HOME")
    if home:
        return expanded(home) / "hub"
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def repository_folder(repository: str) -> Path:
    segments = safe_segments(repository)
    if len(segments) != 2 or "--" in repository:  # the Hub has none with "--", and two would share a folder
        raise UsageError(f"repository: {repository[:300]!r}: not owner/name")
    return hub_cache() / ("models--" + "--".join(segments))


def blob(repository: str, sha256: str) -> Path:
    """The file itself: named by its sha256, linked to from the snapshots that hold it."""
    if not _SHA256.fullmatch(sha256):
        raise UsageError(f"sha256: {sha256[:100]!r}: not 64 lower-case hexadecimal digits")
    return repository_folder(repository) / "blobs" / sha256


def partial_blob(repository: str, sha256: str) -> Path:
    return partial_of(blob(repository, sha256))


def partial_of(final: Path) -> Path:
    """Where a file is while it is on its way to this place."""
    return final.with_name(final.name + PARTIAL)


def snapshot_file(repository: str, commit: str, file: str) -> Path:
    if not _COMMIT.fullmatch(commit):
        raise UsageError(f"commit: {commit[:100]!r}: not 40 lower-case hexadecimal digits")
    return (repository_folder(repository) / "snapshots" / commit).joinpath(*safe_segments(file))


def reference_file(repository: str, revision: str) -> Path:
    """Which commit a branch or a tag was when it was last asked for."""
    return (repository_folder(repository) / "refs").joinpath(*safe_segments(revision))


def shared_lock(repository: str, sha256: str) -> Path:
    """The lock that huggingface_hub takes for a blob."""
    name = blob(repository, sha256).name
    return hub_cache() / ".locks" / repository_folder(repository).name / f"{name}.lock"


def _name(file: str) -> str:
    """A file's name without folders. Raises UsageError for any other."""
    if len(safe_segments(file)) != 1:
        raise UsageError(f"file name: {file[:300]!r}: in a folder")
    return file


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
