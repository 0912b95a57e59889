"""Describes a model to the process that opens it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llmrun.backends.base import AUTO
from llmrun.cli.answers.open_model import local_options
from llmrun.engine.child.messages import Open
from llmrun.engine.child.opening import portable_options

if TYPE_CHECKING:
    from llmrun.cli.answers.open_model import ModelFiles
    from llmrun.options.settings import Settings

_CACHED_PREFIXES = 64  # sequences, which take 4 bytes for each block of 32 tokens


def to_open(
    settings: Settings, files: ModelFiles, *, parallel: int, kv_tokens: int | None, template: str | None
) -> Open:
    """Return what opens a model that answers several requests at a time.

    parallel   the maximum number of answers to generate at a time
    kv_tokens  the size of the KV cache for all requests in tokens; None for what fits
    template   the source of a chat template that replaces the model's own
    """
    entry = files.found.entry
    options = replace(
        local_options(settings),
        max_sequences=parallel,
        kv_tokens=kv_tokens or AUTO,
        cached_prefixes=_CACHED_PREFIXES,
    )
    return Open(
        path=str(files.found.path),
        name=files.found.name,
        options=portable_options(options),
        chat_template=template,
        thinking_tags=None if entry is None else entry.thinking,
        speculate=settings.wants_speculation,
        draft=None if files.draft is None else str(files.draft),
        catalogue=dict(entry.sampling) if entry else {},
    )
