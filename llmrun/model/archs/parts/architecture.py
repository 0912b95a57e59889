"""The declaration that each file of `model/archs/` makes about its architecture."""

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

    every            the last layer of each `every` layers has none; 0 if all layers have one
    default          the window in tokens if the file does not specify one
    first            whether the first layer of each `every` layers has none, instead of the last
    only_with        the number of layers of the only models with windows; 0 if all models have them
    unused           whether the window in the file is never used
    """

    every: int = 0
    default: int = 0
    first: bool = False
    only_with: int = 0
    unused: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture that llmrun supports.

    name         the value of `general.architecture`. The file has the same name, with "_" for "-"
    read_config  reads the config from a file
    plan         builds the plan, and checks every tensor against the config
    models       the common names of its models
    notes        its unusual features
    draft_plan   builds the plan of the draft head, or returns None if the file has none
    windows      which layers have a sliding window in llama.cpp, for sizes that are computed without a plan
    """

    name: str
    read_config: Callable[[GGUFFile], Any]
    plan: Callable[[GGUFFile, Any], Plan]
    models: str
    notes: str = ""
    draft_plan: Callable[[GGUFFile, Any], Plan | None] = _no_head
    windows: Windows | None = None
