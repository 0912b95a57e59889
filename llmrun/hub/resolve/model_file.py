"""A name becomes a file: what is meant, whether it is here, and if not, which source has it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.errors import ModelFileError, ModelNotFound, NetworkError
from llmrun.gguf.opening import FOLDER, NAME_A_FILE, kind_of
from llmrun.hub.catalog.entry import Wanted
from llmrun.hub.local import model_records, stored_models
from llmrun.hub.progress_reporter import Reporter
from llmrun.hub.resolve import model_name
from llmrun.hub.resolve.memory_check import require_memory
from llmrun.hub.resolve.source_fallback import Sources, fetch

if TYPE_CHECKING:
    from llmrun.hub.catalog.entry import CatalogEntry

_CHECK_PATH = "check the path, or use a name such as smollm2:135m"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A file that is on this machine.

    name   what to call it: the catalogue's name, or as it was asked for, or that of the file
    entry  what the catalogue says about it; None for a model that it does not know
    """

    path: Path
    name: str
    entry: CatalogEntry | None


def resolve(name: str, *, offline: bool = False, reporter: Reporter) -> ResolvedModel:
    """The file that `name` means: a path, or a name that `model_name.understand` knows, downloaded if it is not here.

    A model that is here costs no network and no heavy import. That it is used now is remembered. Raises ModelNotFound,
    and what a download raises; with `offline` (or HF_HUB_OFFLINE=1) a NetworkError instead of a download.
    """
    asked = model_name.understand(name)
    if isinstance(asked, model_name.LocalPath):
        path = existing(asked)
        return ResolvedModel(path, path.stem, None)
    here = stored_models.find(asked, reporter)
    if here is None:
        refuse_if_offline(asked, offline)
        sources = Sources(asked, reporter)
        require_memory(sources.offer(), asked, reporter)
        here = fetch(sources, reporter)
    model_records.mark_used(here)
    return ResolvedModel(here, asked.name, asked.entry)


def existing(named: model_name.LocalPath) -> Path:
    """Return the path that the user gave, if a regular file is there.

    Raises ModelNotFound, with the Hub's name for a path such as `owner/name`; ModelFileError for a device or a pipe.
    """
    path = named.path
    try:
        kind = kind_of(path)
    except FileNotFoundError:
        raise ModelNotFound(f"model: {str(path)!r}: no such file", hint=_hint_for_missing(path)) from None
    except (OSError, ValueError) as error:  # a name the system cannot even look up: too long, or with a zero byte
        what = getattr(error, "strerror", None) or str(error)
        raise ModelNotFound(f"model: {str(path)!r}: {what}", hint=_hint_for_missing(path)) from None
    if kind == FOLDER:
        raise ModelNotFound(f"model: {str(path)!r}: is a folder, not a file", hint=_CHECK_PATH)
    if kind:
        raise ModelFileError(f"model: {str(path)!r}: not a regular file: {kind}", hint=NAME_A_FILE)
    return path


def _hint_for_missing(path: Path) -> str:
    meant = model_name.on_hub(path)
    return f"did you mean {meant}?" if meant else _CHECK_PATH


def is_offline(offline: bool) -> bool:
    """Whether nothing may be asked, by the user's word or by huggingface_hub's own switches."""
    hub = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""  # read as it reads them
    return offline or hub.upper() in {"1", "ON", "YES", "TRUE"}


def refuse_if_offline(wanted: Wanted, offline: bool) -> None:
    """Raise NetworkError when nothing may be asked."""
    if not is_offline(offline):
        return
    sizes = [file.size for file in wanted.expected]
    known = sum(size for size in sizes if size is not None) if sizes and None not in sizes else 0
    raise NetworkError(
        f"{wanted.name}: not on this machine{f' ({known:,} bytes to download)' if known else ''}, "
        "and offline was asked for",
        hint="run once without --offline, LLMRUN_OFFLINE and HF_HUB_OFFLINE",
    )
