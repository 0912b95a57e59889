"""A name becomes a file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from llmrun.errors import ModelNotFound, NetworkError
from llmrun.hub import store
from llmrun.hub.catalog import CatalogEntry, load_catalog
from llmrun.hub.reporter import Reporter


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A file that is on this machine, and what the catalogue says about it; None for a file the user named."""

    path: Path
    entry: CatalogEntry | None


def resolve(name: str, *, offline: bool = False, reporter: Reporter) -> ResolvedModel:
    """The file that `name` means: a path, or a name of the catalogue, downloaded if it is not here.

    Anything with a path separator or the ending .gguf is a path. A model that is here costs no network and no heavy
    import. Raises ModelNotFound, and what `download` raises; with `offline` (or HF_HUB_OFFLINE=1) a NetworkError
    instead of a download.
    """
    if is_path(name):
        return ResolvedModel(_existing(name), None)
    entry = load_catalog().find(name)
    path = store.find(entry, reporter)
    if path is None:
        _refuse_if_offline(entry, offline)
        from llmrun.hub.download import download

        path = download(entry, reporter)
    return ResolvedModel(path, entry)


def is_path(name: str) -> bool:
    """Whether the user means a file rather than a name of the catalogue."""
    separators = [separator for separator in (os.sep, os.altsep) if separator]
    return name.lower().endswith(".gguf") or any(separator in name for separator in separators)


def _existing(name: str) -> Path:
    path = Path(os.path.expanduser(name))  # noqa: PTH111 (Path's own raises where there is no such home)
    try:
        if path.is_file():
            return path
        what = "is a folder, not a file" if path.is_dir() else "no such file"
    except (OSError, ValueError) as error:  # a name the system cannot even look up: too long, or with a zero byte
        what = getattr(error, "strerror", None) or str(error)
    raise ModelNotFound(f"model: {name!r}: {what}", hint="check the path, or use a name such as smollm2:135m")


def _refuse_if_offline(entry: CatalogEntry, offline: bool) -> None:
    # huggingface_hub's switches, read as it reads them: who set them wants no traffic at all.
    hub = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    if offline or hub.upper() in {"1", "ON", "YES", "TRUE"}:
        raise NetworkError(
            f"{entry.name}: not on this machine ({entry.size:,} bytes to download), and offline was asked for",
            hint="run once without --offline, LLMRUN_OFFLINE and HF_HUB_OFFLINE",
        )
