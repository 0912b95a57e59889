"""Reads the cache that all Hugging Face tools share, without the 0.4 s that importing huggingface_hub takes.

models--OWNER--NAME/refs/main                     the commit that a branch or a tag last pointed to
models--OWNER--NAME/snapshots/COMMIT/FILE         a link to its blob, or a regular file if links are not supported
models--OWNER--NAME/blobs/SHA256                  the contents of a file
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmrun.base.errors import UsageError
from llmrun.hub.local import paths
from llmrun.hub.local.scandir import entries, is_file, read_small

_COMMIT = re.compile(r"[0-9a-f]{40}")
_REPOSITORY = "models--"
_DEEPEST = 8  # the maximum depth of folders below a snapshot or `refs`; paths.py never nests folders deeper


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository in the cache.

    name       "owner/name"
    folder     the repository's folder in the cache
    refs       branch or tag -> commit
    snapshots  commit -> GGUF files, which map paths in the repository (with "/") to paths on disk
    """

    name: str
    folder: Path
    refs: Mapping[str, str]
    snapshots: Mapping[str, Mapping[str, Path]]

    def revision_of(self, commits: Sequence[str]) -> str:
        """Return a branch or tag that refers to one of these commits, preferably "main", or else the first commit."""
        named = [revision for revision, commit in self.refs.items() if commit in commits]
        return "main" if "main" in named else next(iter(named), commits[0])


def repositories() -> Iterator[Repository]:
    """Yield every model repository in the cache, including those without GGUF files."""
    for entry in entries(paths.hub_cache()):
        name = repository_name(entry.name)
        if name:
            yield read_repository(name)


def repository_name(folder: str) -> str:
    """Convert a folder name such as "models--owner--name" to "owner/name". Returns "" for other folders."""
    name = folder.removeprefix(_REPOSITORY).replace("--", "/", 1)
    try:
        return name if paths.repository_folder(name).name == folder else ""
    except UsageError:
        return ""


def read_repository(name: str) -> Repository:
    """Read a repository from the cache. The result is empty if it is not there. Raises UsageError for invalid names."""
    folder = paths.repository_folder(name)
    snapshots = {
        entry.name: dict(_model_files(Path(entry.path)))
        for entry in entries(folder / "snapshots")
        if _COMMIT.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
    }
    return Repository(name, folder, dict(_refs(folder / "refs")), snapshots)


def _model_files(folder: Path, above: str = "", depth: int = 0) -> Iterator[tuple[str, Path]]:
    for entry in entries(folder):
        if entry.name.lower().endswith(".gguf") and is_file(entry):
            yield above + entry.name, Path(entry.path)
        elif depth < _DEEPEST and entry.is_dir(follow_symlinks=False):
            yield from _model_files(Path(entry.path), f"{above}{entry.name}/", depth + 1)


def _refs(folder: Path, above: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    for entry in entries(folder):
        if depth < _DEEPEST and entry.is_dir(follow_symlinks=False):
            yield from _refs(Path(entry.path), f"{above}{entry.name}/", depth + 1)
        elif is_file(entry):
            try:
                commit = read_small(Path(entry.path)).decode("ascii").strip()
            except (OSError, ValueError):
                continue
            if _COMMIT.fullmatch(commit):
                yield above + entry.name, commit


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether a file is inside a folder after resolving the links in both paths."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
