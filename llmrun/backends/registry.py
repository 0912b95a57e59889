"""The list of backends, and their interface before they open a model. docs/adding-a-backend.md explains how to add one.

Flags, settings, "auto", `fit` and `bench` all use this list. Importing this module is cheap because each backend's
module is imported on first use. The interface is separate from base.py, which the engine uses: only the code that
chooses a backend (select.py) and the code that estimates sizes (fitting.py) need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from llmrun.backends.base import AUTO
from llmrun.base.errors import DoesNotFit

if TYPE_CHECKING:
    from pathlib import Path

    from llmrun.backends.base import Backend, OpenOptions, Progress
    from llmrun.backends.cpu.speeds.forecast import Forecast
    from llmrun.backends.cpu.speeds.machine import Speeds
    from llmrun.backends.sizing import Footprint
    from llmrun.formats.gguf.reader import GGUFFile

_SOFTWARE_DRIVERS = ("llvmpipe", "SwiftShader", "Microsoft Basic Render Driver")  # by Mesa, Google, Microsoft


def is_software_device(name: str) -> bool:
    """Return whether a device with this name computes on the processor. Vulkan lists such devices along with GPUs."""
    return any(driver in name for driver in _SOFTWARE_DRIVERS)


class NoRoomOnGpu(DoesNotFit):
    """Raised when no layer fits on a GPU. Callers that requested "auto" layers continue without GPUs."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of checking whether a backend can run on this machine.

    missing  why the backend cannot run, or "" if it can
    hint     how to fix the problem
    """

    missing: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Gpus:
    """The names of the GPUs that a backend can use, and the `reason` if there are no GPUs."""

    names: tuple[str, ...]
    reason: str = ""

    @property
    def are_software(self) -> bool:
        """True if all devices (at least one) compute on the processor, where our own engine is faster."""
        return bool(self.names) and all(map(is_software_device, self.names))


class GpuSupport(Protocol):
    """The interface to the GPUs that a backend can use."""

    def find(self, progress: Progress | None = None) -> Gpus:
        """Look for GPUs. Failures are returned as the `reason`, not raised. Calls `progress` if the search is slow."""

    def memory(self, options: OpenOptions) -> Sequence[dict[str, Any]]:
        """Return the `description`, the currently `free` bytes and the `total` bytes of each GPU.

        The devices of the RPC servers in `options.rpc` count as GPUs. Only unusable RPC servers raise an error.
        """

    def layers(self, file: GGUFFile, options: OpenOptions, free: Sequence[int]) -> tuple[int, int]:
        """Return the number of layers that fit on all GPUs together, and the total, both including the output layer.

        free  free bytes on each GPU
        """


class BackendKind(Protocol):
    """A backend in the registry, before it opens a model.

    The registry imports the backend's module to choose a backend, so the module must delay heavy imports until `open`.
    """

    @property
    def gpus(self) -> GpuSupport | None:
        """The interface to the backend's GPUs, or None if the backend never uses GPUs."""

    def probe(self) -> Probe:
        """Check whether the backend can run on this machine. The check takes milliseconds and imports few modules."""

    def open(self, file: GGUFFile, options: OpenOptions) -> Backend:
        """Open a model from a file that the GGUF reader has validated.

        Raises UnsupportedModel early for models that this backend cannot run, so that "auto" can try the next backend.
        Raises NoRoomOnGpu if `options.gpu_layers` is "auto" and no layer fits on a GPU. The caller then tries again
        with 0 layers. Raises DoesNotFit, ModelFileError, BackendCrashed and UsageError.
        """

    def footprint(self, file: GGUFFile, options: OpenOptions) -> Footprint:
        """Compute how much memory a model needs without GPUs, from its header. Raises UnsupportedModel."""

    def forecast(self, file: GGUFFile, options: OpenOptions, speeds: Speeds, prompt: int) -> Forecast | None:
        """Predict the model's speed after a prompt of `prompt` tokens, or return None if no prediction is possible."""


class StandIn(Protocol):
    """A backend that answers without a model, for tests."""

    def open(self, path: Path, options: OpenOptions) -> Backend:
        """Open the stand-in. `path` need not exist or be a GGUF file. Raises UsageError."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A backend in the registry.

    name     the value of --backend that selects it
    module   the module that defines the backend's KIND
    program  the program that runs the model, or "" if llmrun runs it
    rpc      whether the backend can use llama.cpp's RPC servers
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
# These backends answer without a model, for tests. Users can select stand-ins by name, but help texts do not list
# stand-ins, and "auto" ignores them.
STAND_INS: Sequence[Entry] = (Entry("scripted", "llmrun.backends.scripted"),)

CHOICES = (AUTO, *(entry.name for entry in BACKENDS))
HIDDEN_CHOICES = tuple(entry.name for entry in STAND_INS)


def backend_named(name: str) -> Entry | None:
    """Return the backend with this name, or None for "auto", stand-ins, and unknown names."""
    return next((entry for entry in BACKENDS if entry.name == name), None)


def stand_in_named(name: str) -> StandIn | None:
    """Return the stand-in with this name, or None."""
    return next((cast("StandIn", _kind_in(entry.module)) for entry in STAND_INS if entry.name == name), None)


def is_stand_in(name: str) -> bool:
    """Return whether the backend with this name answers without a model."""
    return name in HIDDEN_CHOICES


def choices_in_words() -> str:
    """Return the choices as text for a help page: "auto, cpu, or llama (llama.cpp)"."""
    *others, last = [AUTO, *(f"{one.name} ({one.program})" if one.program else one.name for one in BACKENDS)]
    return f"{', '.join(others)}, or {last}"


def _kind_in(module: str) -> Any:
    return import_module(module).KIND
