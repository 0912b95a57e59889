"""The list of backends, one line each. Flags, settings, "auto", `fit` and `bench` all use this list.

Importing this module is cheap because each backend's module is imported on first use.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from llmrun.backends.base import AUTO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmrun.backends.kind import BackendKind, StandIn


@dataclass(frozen=True, slots=True)
class Entry:
    """A backend in the registry.

    name     the value of --backend that selects it
    module   the module that defines the backend's KIND
    program  the program that runs the model, or "" if llmrun runs it
    rpc      whether it can use llama.cpp's RPC servers
    """

    name: str
    module: str
    program: str = ""
    rpc: bool = False

    @property
    def title(self) -> str:
        """The backend's name for use in messages."""
        return self.program or self.name

    def kind(self) -> BackendKind:
        return cast("BackendKind", _kind_in(self.module))


# On the CPU, "auto" tries the backends in this order.
BACKENDS: Sequence[Entry] = (
    Entry("cpu", "llmrun.backends.cpu.kind"),
    Entry("llama", "llmrun.backends.llama.kind", program="llama.cpp", rpc=True),
)
# These backends answer without a model, for tests. Users can select them by name, but they are not listed and "auto"
# ignores them.
STAND_INS: Sequence[Entry] = (Entry("scripted", "llmrun.backends.scripted.backend"),)

CHOICES = (AUTO, *(entry.name for entry in BACKENDS))
HIDDEN_CHOICES = tuple(entry.name for entry in STAND_INS)


def backend_named(name: str) -> Entry | None:
    """Return the backend with this name, or None for "auto", stand-ins and unknown names."""
    return next((entry for entry in BACKENDS if entry.name == name), None)


def stand_in_named(name: str) -> StandIn | None:
    """Return the stand-in with this name, or None."""
    return next((cast("StandIn", _kind_in(entry.module)) for entry in STAND_INS if entry.name == name), None)


def is_stand_in(name: str) -> bool:
    """Return whether this is the name of a backend that answers without a model."""
    return name in HIDDEN_CHOICES


def choices_in_words() -> str:
    """Return the choices as text for a help page: "auto, cpu, or llama (llama.cpp)"."""
    *others, last = [AUTO, *(f"{one.name} ({one.program})" if one.program else one.name for one in BACKENDS)]
    return f"{', '.join(others)}, or {last}"


def _kind_in(module: str) -> Any:
    return import_module(module).KIND
