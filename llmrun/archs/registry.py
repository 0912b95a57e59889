"""Architectures by the string of `general.architecture`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmrun.archs import llama
from llmrun.errors import UnsupportedModel
from llmrun.gguf.problems import shown

if TYPE_CHECKING:
    from llmrun.gguf.reader import GGUFFile
    from llmrun.kernels.plan import Plan


@dataclass(frozen=True, slots=True)
class Architecture:
    """`check` reads the config; `plan` writes the model down, and holds every tensor against the config."""

    check: Callable[[GGUFFile], Any]
    plan: Callable[[GGUFFile, Any], Plan]


ARCHITECTURES = {"llama": Architecture(llama.check, llama.plan)}


def architecture_of(file: GGUFFile) -> Architecture:
    """Raises UnsupportedModel for an architecture without a file here."""
    name = file.string("general.architecture")
    found = ARCHITECTURES.get(name)
    if found is None:
        raise UnsupportedModel(
            f"architecture not supported: {shown(str(file.path), 300)}: '{shown(name)}', the CPU engine runs "
            + ", ".join(ARCHITECTURES),
            hint="Choose a model of one of those architectures.",
        )
    return found


def plan_of_header(file: GGUFFile) -> Plan:
    """The plan of a model, no weight of which is read: for arithmetic about it. Raises BadGGUF and UnsupportedModel."""
    architecture = architecture_of(file)
    made_up = file.with_made_up_weights()
    return architecture.plan(made_up, architecture.check(made_up))
