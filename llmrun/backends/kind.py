"""The interface of a backend before it opens a model. docs/adding-a-backend.md explains how to add a backend.

This module is separate from base.py, which the engine uses. Only the code that chooses a backend (select.py) and the
code that estimates sizes (fitting.py) need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from llmrun.base.errors import DoesNotFit
from llmrun.base.machine.software_devices import is_software_device

if TYPE_CHECKING:
    from pathlib import Path

    from llmrun.backends.base import Backend, OpenOptions, Progress
    from llmrun.backends.cpu.speeds.forecast import Forecast
    from llmrun.backends.cpu.speeds.machine import Speeds
    from llmrun.backends.sizing.footprint import Footprint
    from llmrun.formats.gguf.reader import GGUFFile


class NoRoomOnGpu(DoesNotFit):
    """Raised when no layer fits on a GPU. Callers that asked for "auto" layers continue without GPUs."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of checking whether a backend can run on this machine.

    missing  why it cannot run, or "" if it can
    hint     how to fix the problem
    """

    missing: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Gpus:
    """The names of the GPUs that a backend can use. If there are none, `reason` says why."""

    names: tuple[str, ...]
    reason: str = ""

    @property
    def are_software(self) -> bool:
        """Whether all devices compute on the processor, where our own engine is faster. False if there are none."""
        return bool(self.names) and all(map(is_software_device, self.names))


class GpuSupport(Protocol):
    """The interface to the GPUs that a backend can use."""

    def find(self, progress: Progress | None = None) -> Gpus:
        """Look for GPUs. Failures are returned as the `reason`, not raised. Calls `progress` if the search is slow."""

    def memory(self, options: OpenOptions) -> Sequence[dict[str, Any]]:
        """Return the `description`, the currently `free` bytes and the `total` bytes of each GPU.

        The devices of the RPC servers in `options.rpc` count as GPUs. Only unusable servers raise an error.
        """

    def layers(self, file: GGUFFile, options: OpenOptions, free: Sequence[int]) -> tuple[int, int]:
        """Return how many layers fit on all GPUs together, and how many the model has. Both include the output layer.

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
        """Check whether the backend can run on this machine. This takes milliseconds and imports nothing heavy."""

    def open(self, file: GGUFFile, options: OpenOptions) -> Backend:
        """Open a model from a file that the GGUF reader has validated.

        Raises UnsupportedModel early for models that this backend cannot run, so that "auto" can try the next one.
        Raises NoRoomOnGpu if `options.gpu_layers` is "auto" and no layer fits on a GPU. The caller then tries again
        with 0 layers. Raises DoesNotFit, ModelFileError, BackendCrashed and UsageError.
        """

    def footprint(self, file: GGUFFile, options: OpenOptions) -> Footprint:
        """Compute how much memory a model needs without GPUs, from its header. Raises UnsupportedModel."""

    def forecast(self, file: GGUFFile, options: OpenOptions, speeds: Speeds, prompt: int) -> Forecast | None:
        """Predict the speed of the model after a prompt of `prompt` tokens. Returns None if it cannot be predicted."""


class StandIn(Protocol):
    """A backend that answers without a model, for tests."""

    def open(self, path: Path, options: OpenOptions) -> Backend:
        """Open the stand-in. `path` need not exist or be a GGUF file. Raises UsageError."""
