"""What a shell may complete a flag or an argument with: the functions that options give as `autocompletion`.

They run only when a shell asks (`cli/completing`), and so import what they need only then. Each returns all values,
alone or with a description; FILES among them means that names of files will do as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from llmrun.errors import UsageError

FILES = "<files>"
_HERE = "on this machine"


def one_of(*choices: str) -> Callable[[], list[str]]:
    """Return a function that returns these values."""
    return lambda: list(choices)


def models() -> list[tuple[str, str] | str]:
    """Return the models here and those of the catalogue; files will do."""
    from llmrun.hub.catalog.lookup import load_catalog

    names: tuple[str, ...] = ()
    with contextlib.suppress(UsageError):  # of a broken catalogue, whichever command runs will tell
        names = load_catalog().names()
    found = dict.fromkeys(names, "to download") | dict(models_here())
    return [*found.items(), FILES]


def models_here() -> list[tuple[str, str]]:
    """Return the models on this machine."""
    from llmrun.hub.upkeep import inventory

    return [(model.name, _HERE) for model in inventory.models()]


def models_here_or_files() -> list[tuple[str, str] | str]:
    """Return the models on this machine; files will do."""
    return [*models_here(), FILES]


def repositories_here() -> list[str]:
    """Return the repositories of the Hub that models on this machine are from."""
    from llmrun.hub.upkeep import inventory

    return list(dict.fromkeys(model.repository for model in inventory.models() if model.repository))
