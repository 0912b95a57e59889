"""What a backend says about itself before it opens a model. How to add one: docs/adding-a-backend.md.

This is apart from base.py, which the engine uses: it is for choosing a backend (select.py) and for sizing (fitting.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from llmrun.errors import DoesNotFit

if TYPE_CHECKING:
    from pathlib import Path

    from llmrun.backends.base import Backend, OpenOptions, Progress
    from llmrun.backends.cpu.speeds.forecast import Forecast
    from llmrun.backends.cpu.speeds.machine import Speeds
    from llmrun.backends.sizing.footprint import Footprint
    from llmrun.gguf.reader import GGUFFile


class NoRoomOnGpu(DoesNotFit):
    """No layer fits on a GPU. Callers that asked for as many as fit continue without GPUs."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a backend can run on this machine. `missing` says why not ("" if it can), `hint` what to do about it."""

    missing: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs that a backend can run layers on, by name. When there are none, `reason` says why."""

    names: tuple[str, ...]
    reason: str = ""


class GpuSupport(Protocol):
    """What a backend that uses GPUs says about them."""

    def find(self, progress: Progress | None = None) -> Gpus:
        """Look for GPUs. Never raises: a failure becomes the `reason`. `progress` is called if this takes long."""

    def memory(self) -> Sequence[dict[str, Any]]:
        """Return each GPU's `description` and its current `free` and `total` bytes. Never raises."""

    def layers(self, file: GGUFFile, options: OpenOptions, free: Sequence[int]) -> tuple[int, int]:
        """Return how many layers fit into each GPU's `free` bytes, and how many there are, with the output layer."""


class BackendKind(Protocol):
    """A backend as the registry knows it, before it opens a model.

    Its module is imported to choose a backend, so it must import what it runs models with only in `open`.
    """

    @property
    def gpus(self) -> GpuSupport | None:
        """None for a backend that never uses GPUs."""

    def probe(self) -> Probe:
        """Say whether the backend can run here. Takes milliseconds and imports nothing heavy."""

    def open(self, file: GGUFFile, options: OpenOptions) -> Backend:
        """Open the model of a file that has passed the reader.

        Raises UnsupportedModel early for models that this backend cannot run: "auto" then asks the next one. Raises
        NoRoomOnGpu if `options.gpu_layers` is "auto" and a backend with `gpus` cannot put a single layer on them; it is
        then asked again with 0. Raises DoesNotFit, ModelFileError, BackendCrashed and UsageError.
        """

    def footprint(self, file: GGUFFile, options: OpenOptions) -> Footprint:
        """Return the memory that a model needs without GPUs, from its header alone. Raises UnsupportedModel."""

    def forecast(self, file: GGUFFile, options: OpenOptions, speeds: Speeds, prompt: int) -> Forecast | None:
        """Predict how fast the model will be after `prompt` tokens. Returns None if that is unknown."""


class StandIn(Protocol):
    """A backend that answers without a model, for tests."""

    def open(self, path: Path, options: OpenOptions) -> Backend:
        """Open a path that need not be a GGUF file, nor exist. Raises UsageError."""
