"""What each file of `model/archs/` declares about its architecture."""

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
class Architecture:
    """An architecture that llmrun supports.

    name         the value of `general.architecture`. The file has the same name, with "_" for "-"
    read_config  reads the config from a file
    plan         builds the plan, and checks every tensor against the config
    models       the common names of its models
    notes        its unusual features
    draft_plan   builds the plan of the draft head, or returns None if the file has none
    """

    name: str
    read_config: Callable[[GGUFFile], Any]
    plan: Callable[[GGUFFile, Any], Plan]
    models: str
    notes: str = ""
    draft_plan: Callable[[GGUFFile, Any], Plan | None] = _no_head
