"""Downloads that were begun and not ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmrun.hub import places
from llmrun.hub.folders import entries, is_file
from llmrun.hub.hub_cache import repository_name


@dataclass(frozen=True, slots=True)
class Partial:
    """What is here of a model that is on its way, or was.

    name   what to give to `llmrun pull`
    files  the half-done file and what lies beside it
    done   bytes that are here
    total  bytes of the whole; 0: not known
    """

    name: str
    files: tuple[Path, ...]
    done: int
    total: int


def partials() -> list[Partial]:
    """Those of ours; other tools' cannot be gone on with."""
    return []
