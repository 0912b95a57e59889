"""Prints a note that the default model is only a toy, and suggests a better model for this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from llmrun.backends.registry import is_stand_in
from llmrun.base.amounts import format_bytes
from llmrun.base.folders import data_folder
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import is_terminal
from llmrun.options.settings import Settings, is_set

if TYPE_CHECKING:
    from pathlib import Path


def tell_of_default_model(settings: Settings, command: str) -> None:
    """Print a note that the default model is a toy. The note appears only once, and only on a terminal.

    A file in the data folder records that the note was shown. If this file cannot be written, the note is not shown at
    all, because it would otherwise appear on every run.

    command  the command that opens another model, such as `llmrun chat`
    """
    if out.quiet or not is_terminal(sys.stderr) or is_stand_in(settings.backend):
        return
    told = data_folder() / "told" / "default-model"
    if settings.model != Settings().model or told.exists() or is_set("model") or not _remembered(told):
        return
    out.note(_sentence(settings.model, command))


def _sentence(model: str, command: str) -> str:
    from llmrun.base.machine.free_memory import free_memory
    from llmrun.hub.catalog.lookup import load_catalog
    from llmrun.hub.resolve.suggestion import quoted_size, suggested_model

    size = quoted_size(load_catalog().entry(model))
    toy = f"{model} is a toy model ({format_bytes(size or 0)}) for trying out llmrun"
    memory = free_memory()
    suits = suggested_model(memory) if memory is not None else None
    if suits is None:
        return f"{toy}; `llmrun fit qwen3:4b` shows whether a larger model fits"
    return f"{toy}; {suits.name} suits this machine ({format_bytes(suits.size)}): {command} {suits.name}"


def _remembered(told: Path) -> bool:
    try:
        told.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        told.touch(exist_ok=False)
    except OSError:  # another process has just shown the note, or the folder is not writable
        return False
    return True
