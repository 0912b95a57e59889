"""The supported architectures, by their `general.architecture` name.

Each file of this folder declares one architecture, and is imported only for a model of that architecture. Otherwise,
planning one model would import sixty files.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from llmrun.base.errors import UnsupportedModel, shown
from llmrun.model.archs.parts.architecture import Architecture

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan

# Error messages list only these architectures, because the full list would be too long.
_KNOWN_BEST = ("llama", "qwen3", "gemma3", "phi3")


def architecture_of(file: GGUFFile) -> Architecture:
    """Return the architecture of a file. Raises UnsupportedModel if the architecture is not registered."""
    name = file.string("general.architecture")
    found = architecture_named(name)
    if found is None:
        raise UnsupportedModel(
            f"architecture not supported: {shown(str(file.path), 300)}: '{shown(name)}'; the CPU engine supports "
            f"{len(_modules())} architectures, such as {', '.join(_KNOWN_BEST)}",
            hint="This model may run with --backend llama. docs/models.md lists all architectures.",
        )
    return found


def architecture_named(name: str) -> Architecture | None:
    """Return the architecture with the given name, or None if llmrun does not support it."""
    module = name.replace("-", "_")
    found = _declared_in(module) if module in _modules() else None
    return found if found is not None and found.name == name else None


def architectures() -> dict[str, Architecture]:
    """Import every file of this folder, and return all architectures by name."""
    found = [_declared_in(module) for module in sorted(_modules())]
    return {architecture.name: architecture for architecture in found}


@cache
def _modules() -> frozenset[str]:
    """Return the names of the files in this folder that declare an architecture."""
    folder = Path(__file__).parent
    return frozenset(found.name for found in iter_modules([str(folder)]) if not found.ispkg) - {"registry"}


def _declared_in(module: str) -> Architecture:
    found: Architecture = import_module(f"llmrun.model.archs.{module}").ARCHITECTURE
    return found


def table() -> str:
    """Return the table of architectures for docs/models.md, with the columns name, models and notes."""
    rows = [("`general.architecture`", "models", "notes"), ("---", "---", "---")]
    rows += [(f"`{name}`", found.models, found.notes) for name, found in architectures().items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def plan_of_header(file: GGUFFile) -> Plan:
    """Return the plan of a model for computing sizes, without reading weights. Raises BadGGUF and UnsupportedModel."""
    architecture = architecture_of(file)
    made_up = file.with_placeholder_weights()
    return architecture.plan(made_up, architecture.read_config(made_up))


def draft_plan_of_header(file: GGUFFile) -> Plan | None:
    """Return the plan of a model's draft head for computing sizes, or None if the file contains no draft head."""
    architecture = architecture_of(file)
    made_up = file.with_placeholder_weights()
    return architecture.draft_plan(made_up, architecture.read_config(made_up))
