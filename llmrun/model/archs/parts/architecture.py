"""The declaration of an architecture, which each file of `model/archs/` contains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


def _no_head(file: GGUFFile, config: Any) -> Plan | None:
    return None


@dataclass(frozen=True, slots=True)
class Windows:
    """The layers that have a sliding window, if the file does not list them.

    every            the last layer of each `every` layers has no window; 0 if all layers have a window
    default          the window in tokens if the file does not specify one
    first            True if the first layer of each `every` layers has no window, instead of the last layer
    only_with        the number of layers of the only models with windows; 0 if all models have windows
    unused           True if the window in the file is never used
    """

    every: int = 0
    default: int = 0
    first: bool = False
    only_with: int = 0
    unused: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture that llmrun supports.

    name         the value of `general.architecture`. The module has the same name, with "_" for "-"
    read_config  a function that reads the config from a file
    plan         a function that builds the plan, and checks every tensor against the config
    models       the common names of the architecture's models
    notes        the unusual features of the architecture
    draft_plan   a function that builds the plan of the draft head, or returns None for files without a draft head
    windows      the layers that have a sliding window in llama.cpp, for sizes that are computed without a plan
    """

    name: str
    read_config: Callable[[GGUFFile], Any]
    plan: Callable[[GGUFFile, Any], Plan]
    models: str
    notes: str = ""
    draft_plan: Callable[[GGUFFile, Any], Plan | None] = _no_head
    windows: Windows | None = None
