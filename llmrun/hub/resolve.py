"""What the user calls a model becomes a file on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from llmrun.errors import ModelNotFound, NetworkError
from llmrun.hub import store
from llmrun.hub.catalog import CatalogEntry, load_catalog
from llmrun.hub.reporter import Reporter

_YES = frozenset({"1", "on", "true", "yes"})


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """`entry` is None for a file that the user named by its path."""

    path: Path
    entry: CatalogEntry | None


def resolve(name: str, *, offline: bool = False, reporter: Reporter) -> ResolvedModel:
    """The file of a path to a .gguf, or of a name in the catalogue, downloaded if it is not here.

    Raises ModelNotFound, and for a download NetworkError, IntegrityError, DoesNotFit or LlmrunError.
    """
    if _is_path(name):
        return ResolvedModel(_existing(name), None)
    entry = load_catalog().find(name)
    path = store.find(entry, reporter)
    if path is None:
        if offline or os.environ.get("HF_HUB_OFFLINE", "").lower() in _YES:
            raise NetworkError(
                f"model not on this machine: {entry.name}: {entry.size / 1e6:.0f} MB to download, but offline",
                hint="run once without --offline, LLMRUN_OFFLINE and HF_HUB_OFFLINE",
            )
        from llmrun.hub.download import download

        path = download(entry, reporter)
    return ResolvedModel(path, entry)


def _is_path(name: str) -> bool:
    separators = (os.sep, os.altsep) if os.altsep else (os.sep,)
    return name.lower().endswith(".gguf") or any(separator in name for separator in separators)


def _existing(name: str) -> Path:
    path = Path(name)
    try:
        path = path.expanduser()
        found = path.exists()
    except (OSError, RuntimeError, ValueError):  # a name too long, no home folder, a NUL byte
        found = False
    if not found:
        shown = "".join(letter if letter.isprintable() else "?" for letter in name)[:300]
        raise ModelNotFound(
            f"no such model file: {shown}",
            hint="check the path; names without a slash, such as smollm2:135m, need none",
        )
    return path
