"""Resolves a model's name to a file on this machine, and downloads the file if necessary."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.base.errors import ModelFileError, ModelNotFound, NetworkError
from llmrun.formats.gguf.opening import FOLDER, NAME_A_FILE, kind_of
from llmrun.hub.catalog.entry import Wanted
from llmrun.hub.local import model_records, stored_models
from llmrun.hub.progress_reporter import Reporter
from llmrun.hub.resolve import model_name
from llmrun.hub.resolve.memory_check import require_memory
from llmrun.hub.resolve.source_fallback import Sources, fetch

if TYPE_CHECKING:
    from llmrun.backends.base import OpenOptions
    from llmrun.hub.catalog.entry import CatalogEntry

_CHECK_PATH = "check the path, or use a name such as smollm2:135m"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model file on this machine.

    name   the name to display, which is the catalogue's name, the requested name or the file's name
    entry  the model's catalogue entry; None if the catalogue does not contain it
    """

    path: Path
    name: str
    entry: CatalogEntry | None


def resolve(
    name: str, *, offline: bool = False, reporter: Reporter, options: OpenOptions | None = None
) -> ResolvedModel:
    """Return the file for a path or model name. Downloads it if it is not on this machine.

    If `options` name RPC servers, a model that fits into their memory and this machine's is downloaded too.

    For local models, this function sends no network request and makes no slow import. It records the time of use.
    Raises ModelNotFound and all errors of a download. With `offline` (or HF_HUB_OFFLINE=1), it raises NetworkError
    instead of downloading.
    """
    asked = model_name.understand(name)
    if isinstance(asked, model_name.LocalPath):
        path = existing(asked)
        return ResolvedModel(path, path.stem, None)
    here = stored_models.find(asked, reporter)
    if here is None:
        refuse_if_offline(asked, offline)
        sources = Sources(asked, reporter)
        require_memory(sources.offer(), asked, reporter, options)
        here = fetch(sources, reporter)
    model_records.mark_used(here)
    return ResolvedModel(here, asked.name, asked.entry)


def existing(named: model_name.LocalPath) -> Path:
    """Return the path that the user gave if it is a regular file.

    Raises ModelFileError for a device or a pipe, and ModelNotFound for a missing file. For paths such as `owner/name`,
    the hint contains the corresponding Hub name.
    """
    path = named.path
    try:
        kind = kind_of(path)
    except FileNotFoundError:
        raise ModelNotFound(f"model: {str(path)!r}: no such file", hint=_hint_for_missing(path)) from None
    except (OSError, ValueError) as error:  # the path is invalid: it is too long or contains a NUL byte
        what = getattr(error, "strerror", None) or str(error)
        raise ModelNotFound(f"model: {str(path)!r}: {what}", hint=_hint_for_missing(path)) from None
    if kind == FOLDER:
        is_checkpoint = (path / "config.json").exists()
        raise ModelNotFound(
            f"model: {str(path)!r}: is a folder, not a file",
            hint=f"convert the checkpoint first: llmrun convert {path} OUT.gguf" if is_checkpoint else _CHECK_PATH,
        )
    if kind:
        raise ModelFileError(f"model: {str(path)!r}: not a regular file: {kind}", hint=NAME_A_FILE)
    return path


def _hint_for_missing(path: Path) -> str:
    meant = model_name.on_hub(path)
    return f"did you mean {meant}?" if meant else _CHECK_PATH


def is_offline(offline: bool) -> bool:
    """Return whether the user, or an environment variable that huggingface_hub also honors, forbids network access."""
    hub = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return offline or hub.upper() in {"1", "ON", "YES", "TRUE"}


def refuse_if_offline(wanted: Wanted, offline: bool) -> None:
    """Raise NetworkError in offline mode, with the size of the download that would be required."""
    if not is_offline(offline):
        return
    sizes = [file.size for file in wanted.expected]
    known = sum(size for size in sizes if size is not None) if sizes and None not in sizes else 0
    raise NetworkError(
        f"{wanted.name}: not on this machine{f' ({known:,} bytes to download)' if known else ''}, "
        "and offline mode is on",
        hint="run once without --offline and with LLMRUN_OFFLINE and HF_HUB_OFFLINE unset",
    )
