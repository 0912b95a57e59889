"""The list of backends, their interface before they open a model, and the choice of a backend for a model file.

docs/adding-a-backend.md explains how to add a backend. Flags, settings, "auto", `fit` and `bench` all use the list.
Importing this module is cheap because each backend's module is imported on first use. The interface is separate from
base.py, which the engine uses. Our strict GGUF reader validates every file before a backend opens it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from msgspec import Struct

from llmrun.backends.base import AUTO, RPC_OFF, TRAINED_CONTEXT
from llmrun.base.errors import DoesNotFit, UnsupportedModel, UsageError
from llmrun.formats.layouts.kv import KV_TYPE, parse_kv_type

if TYPE_CHECKING:
    from llmrun.backends.base import Backend, OpenOptions, Progress
    from llmrun.backends.cpu.speeds.forecast import Forecast
    from llmrun.backends.cpu.speeds.machine import Speeds
    from llmrun.backends.sizing import Footprint
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.vision.projector import ProjectorFile

T = TypeVar("T")

_SOFTWARE_DRIVERS = ("llvmpipe", "SwiftShader", "Microsoft Basic Render Driver")  # by Mesa, Google, Microsoft


def is_software_device(name: str) -> bool:
    """Return whether a device with this name computes on the processor. Vulkan lists such devices along with GPUs."""
    return any(driver in name for driver in _SOFTWARE_DRIVERS)


class NoRoomOnGpu(DoesNotFit):
    """Raised when no layer fits on a GPU. Callers that requested "auto" layers continue without GPUs."""


class Probe(Struct, frozen=True):
    """The result of checking whether a backend can run on this machine.

    missing  why the backend cannot run, or "" if it can
    hint     how to fix the problem
    """

    missing: str = ""
    hint: str = ""


class Gpus(Struct, frozen=True):
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

    def check_servers(self, options: OpenOptions) -> None:
        """Check the RPC servers in `options.rpc` before a model is opened. Raises the error of an unusable server."""

    def layers(self, file: GGUFFile, options: OpenOptions, free: Sequence[int]) -> tuple[int, int]:
        """Return the number of layers that fit on all GPUs together, and the total, both including the output layer.

        free  free bytes on each GPU
        """


class ImageCosts(Struct, frozen=True):
    """The memory and time that a model needs for images.

    memory   bytes for the encoder's weights, and for encoding an image of the usual detail
    photo_s  seconds to encode the sample photo, or None if unknown
    """

    memory: int
    photo_s: float | None = None


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

    def image_costs(self, file: GGUFFile, projector: ProjectorFile, threads: int, speeds: Speeds | None) -> ImageCosts:
        """Compute what images cost, from the header of a projector. Raises BadGGUF and UnsupportedModel.

        file    the projector's file, whose data may not be available
        speeds  the speeds of the machine, or None to predict no time; may raise LookupError (`Speeds.only_known`)
        """


class StandIn(Protocol):
    """A backend that answers without a model, for tests."""

    def open(self, path: Path, options: OpenOptions) -> Backend:
        """Open the stand-in. `path` need not exist or be a GGUF file. Raises UsageError."""


class Entry(Struct, frozen=True):
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


def open_backend(path: Path, options: OpenOptions) -> Backend:
    """Open a model file with the requested backend, or with the best backend if the options request "auto".

    "auto" uses the first backend that can run layers of the model on a GPU. If no backend can use a GPU, "auto" uses
    the first backend that supports the model. Software drivers count as GPUs only if the options request GPU layers.
    If RPC servers are given, the backend that can use them is chosen. Raises ModelFileError, UnsupportedModel,
    DoesNotFit, BackendCrashed, NetworkError and UsageError.
    """
    stand_in = stand_in_named(options.backend)
    if stand_in is not None:
        return stand_in.open(path, options)
    named = _named(options)
    from llmrun.formats.gguf.metadata import check_is_model
    from llmrun.formats.gguf.reader import open_gguf

    with open_gguf(path) as file:
        check_is_model(file)
        options.on_header(file)
        if options.context_size == TRAINED_CONTEXT:
            architecture = file.string("general.architecture")
            options = replace(options, context_size=file.integer(f"{architecture}.context_length", minimum=1))
        return _open_best(file, options) if named is None else _open_named(named, file, options)


def usable_gpus() -> tuple[str, ...]:
    """Return the names of the GPUs on which "auto" may run a model. Software drivers do not count."""
    found = [kind.gpus.find() for kind in (entry.kind() for entry in BACKENDS) if kind.gpus is not None]
    return tuple(name for gpus in found if not gpus.are_software for name in gpus.names)


def check_supported(file: GGUFFile) -> None:
    """Check a model's header. Raises UnsupportedModel if no backend on this machine supports the model, and BadGGUF."""
    from llmrun.backends.base import OpenOptions

    options = OpenOptions()
    _first_supporting(lambda entry, refusal: entry.kind().footprint(file, options))


def check_options(options: OpenOptions) -> None:
    """Check the options before the model is located, because locating a model may require a download.

    Raises UsageError for invalid options, and the errors of RPC servers that cannot be used.
    """
    from llmrun.backends.lora_files import LoraOption

    for text in options.adapters:
        LoraOption.parse(text).check()
    if stand_in_named(options.backend) is not None:
        return
    named = _named(options)
    if options.rpc and named is not None and (gpus := named.kind().gpus) is not None:
        gpus.check_servers(options)


def _named(options: OpenOptions) -> Entry | None:
    """Return the requested backend, or None for "auto". Raises UsageError for invalid options."""
    choices = ", ".join
    if options.backend not in CHOICES:
        raise UsageError(f"invalid value for --backend: '{options.backend}', choose from {choices(CHOICES)}")
    try:
        if options.kv_type is not None:
            parse_kv_type(options.kv_type)
    except ValueError:
        raise UsageError(f"invalid value for --kv-type: '{options.kv_type}', choose from {KV_TYPE.words}") from None
    if options.main_gpu is not None and options.split_mode != "none":
        raise UsageError("--main-gpu: works only with --split-mode none", hint="add --split-mode none")
    if options.tensor_split and options.split_mode == "none":
        raise UsageError("--tensor-split: cannot be combined with --split-mode none, which uses a single device")
    low, high = options.image_min_tokens, options.image_max_tokens
    if low is not None and high is not None and low > high:
        raise UsageError(f"--image-min-tokens: {low} is larger than --image-max-tokens {high}")
    if options.rpc:
        return _with_rpc(options)
    entry = backend_named(options.backend)
    if entry is not None and (probe := entry.kind().probe()).missing:
        raise UsageError(f"{probe.missing}: --backend {entry.name}", hint=probe.hint)
    return entry


def _with_rpc(options: OpenOptions) -> Entry:
    """Return the backend that uses RPC servers. Raises UsageError if the options request another backend."""
    if options.gpu_layers == 0:
        raise UsageError("--rpc: cannot be combined with --gpu-layers 0, which leaves no layers for the servers")
    entry = next(entry for entry in BACKENDS if entry.rpc)
    if options.backend not in (AUTO, entry.name):
        raise UsageError(
            f"--rpc: works only with --backend {entry.name}, not with {options.backend}",
            hint=f"use --backend {entry.name}, or --rpc {RPC_OFF}",
        )
    return entry


def _open_named(entry: Entry, file: GGUFFile, options: OpenOptions) -> Backend:
    """Open the model with this backend. Use only the CPU if `gpu_layers` is "auto" and no layer fits on a GPU.

    Raises NoRoomOnGpu if no layer fits on any RPC server, because the user requested the servers.
    """
    try:
        return entry.kind().open(file, options)
    except NoRoomOnGpu as refusal:
        if options.rpc:
            raise
        options.explain(f"not using GPUs: {refusal}")
    return entry.kind().open(file, options.without_gpus())


def _open_best(file: GGUFFile, options: OpenOptions) -> Backend:
    reason = "no GPU layers were requested"
    for entry in BACKENDS:
        kind = entry.kind()
        if options.gpu_layers == 0 or kind.gpus is None:
            continue
        found = kind.gpus.find(options.progress)
        reason = found.reason
        if found.are_software and options.gpu_layers == AUTO:
            reason = f"{' and '.join(found.names)} is not a GPU but a software driver"
        elif found.names:
            try:
                opened = kind.open(file, options)
            except (NoRoomOnGpu, UnsupportedModel) as refusal:
                reason = str(refusal)
            else:
                options.explain(f"auto chose {entry.name}: it can use {' and '.join(found.names)}")
                return opened
    return _open_without_gpus(file, options.without_gpus(), reason)


def _open_without_gpus(file: GGUFFile, options: OpenOptions, reason: str) -> Backend:
    def opened(entry: Entry, refusal: UnsupportedModel | None) -> Backend:
        backend = entry.kind().open(file, options)
        options.explain(f"auto chose {entry.name}: {refusal or reason}")
        return backend

    return _first_supporting(opened)


def _first_supporting(attempt: Callable[[Entry, UnsupportedModel | None], T]) -> T:
    """Return the result of `attempt` for the first installed backend that does not raise UnsupportedModel.

    attempt  takes a backend, and the error of the backend before it or None
    Raises the last UnsupportedModel if no backend is left. The hint then names the backends that are not installed.
    """
    refusal: UnsupportedModel | None = None
    for entry in BACKENDS:
        probe = entry.kind().probe()
        if probe.missing:
            if refusal is not None:
                refusal = UnsupportedModel(str(refusal), hint=f"{entry.title} may support this model; {probe.hint}")
            continue
        try:
            return attempt(entry, refusal)
        except UnsupportedModel as error:
            refusal = error
    assert refusal is not None, "at least the CPU engine is always installed"
    raise refusal
