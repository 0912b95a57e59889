"""What lies in the cache that all Hugging Face tools share, read without them (importing theirs takes 0.4 s).

models--OWNER--NAME/refs/main                     the commit that a branch or a tag was when it was last asked for
models--OWNER--NAME/snapshots/COMMIT/FILE         a link to its blob; a file where links cannot be made
models--OWNER--NAME/blobs/SHA256                  the bytes
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmrun.errors import UsageError
from llmrun.hub.local import paths
from llmrun.hub.local.scandir import entries, is_file, read_small

_COMMIT = re.compile(r"[0-9a-f]{40}")
_REPOSITORY = "models--"
_DEEPEST = 8  # folders below a snapshot, or below refs; paths.py takes no more


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository of which something is here.

    name       "owner/name"
    folder     of it in the cache
    refs       a branch or tag -> commit
    snapshots  commit -> its GGUF files: path inside the repository, with "/" -> where it is
    """

    name: str
    folder: Path
    refs: Mapping[str, str]
    snapshots: Mapping[str, Mapping[str, Path]]

    def revision_of(self, commits: Sequence[str]) -> str:
        """How to name one of these commits: "main", another branch or tag, or the first itself."""
        named = [revision for revision, commit in self.refs.items() if commit in commits]
        return "main" if "main" in named else next(iter(named), commits[0])


def repositories() -> Iterator[Repository]:
    """Those that hold a GGUF file in a snapshot, or may be going to."""
    for entry in entries(paths.hub_cache()):
        name = repository_name(entry.name)
        if name:
            yield read_repository(name)


def repository_name(folder: str) -> str:
    """ "models--owner--name" -> "owner/name"; "" for any other folder."""
    name = folder.removeprefix(_REPOSITORY).replace("--", "/", 1)
    try:
        return name if paths.repository_folder(name).name == folder else ""
    except UsageError:
        return ""


def read_repository(name: str) -> Repository:
    """An empty one where nothing is. Raises UsageError for a name that cannot be."""
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
    """Whether a file, links followed, lies in this folder, links followed."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
