"""Functions that return shell completions for flags and arguments. Options use them as `autocompletion`.

They run only when a shell requests completions (see `cli/completing`), so each function contains its own imports. Each
returns all possible values, with or without descriptions. FILES in the result means that file names are valid too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from llmrun.base.errors import UsageError

FILES = "<files>"
_HERE = "on this machine"


def one_of(*choices: str) -> Callable[[], list[str]]:
    """Return a completion function for a fixed list of values."""
    return lambda: list(choices)


def files() -> list[str]:
    """Return FILES, for a value that Typer sees as text."""
    return [FILES]


def models() -> list[tuple[str, str] | str]:
    """Return the user's presets, the models on this machine and those in the catalogue, and FILES."""
    from llmrun.hub.catalog.lookup import load_catalog
    from llmrun.options.settings import load_presets

    names: tuple[str, ...] = ()
    presets: dict[str, str] = {}
    with contextlib.suppress(UsageError):  # the command itself will report a broken catalogue
        presets = {preset.name: f"preset of {preset.model}" for preset in load_presets().values()}
        names = load_catalog().names()
    found = dict.fromkeys(names, "to download") | dict(models_here()) | presets
    return [*found.items(), FILES]


def drafts() -> list[tuple[str, str] | str]:
    """Return the values of --speculate: auto, off and the names of models."""
    return [("auto", "drafts by lookup"), ("off", "no drafts"), *models()]


def models_here() -> list[tuple[str, str]]:
    """Return the models on this machine."""
    from llmrun.hub.upkeep import inventory

    return [(model.name, _HERE) for model in inventory.models()]


def models_here_or_files() -> list[tuple[str, str] | str]:
    """Return the models on this machine, and FILES."""
    return [*models_here(), FILES]


def repositories_here() -> list[str]:
    """Return the Hub repositories of the models on this machine."""
    from llmrun.hub.upkeep import inventory

    return list(dict.fromkeys(model.repository for model in inventory.models() if model.repository))
