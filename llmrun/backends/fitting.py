"""Whether a model fits this machine, and how fast it would be, by its header alone: nothing is fetched or loaded.

The backend is the one that `auto` would choose (select.py), and the sums are those that it opens the model by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from llmrun.archs.parts.tensors import common_type, parameter_count
from llmrun.backends.base import OpenOptions
from llmrun.backends.registry import BACKENDS
from llmrun.errors import UnsupportedModel
from llmrun.machine.cpu_count import default_threads
from llmrun.machine.free_memory import free_memory

if TYPE_CHECKING:
    from llmrun.backends.cpu.speeds.forecast import Forecast
    from llmrun.backends.cpu.speeds.machine import Speeds
    from llmrun.backends.registry import Entry
    from llmrun.backends.sizing.footprint import Footprint
    from llmrun.gguf.reader import GGUFFile

DEFAULT_CONTEXT: Final = 4096  # tokens that sizes are told for when nobody says: a chat of some length
DEFAULT_PROMPT: Final = 512
FLUENT: Final = 10.0  # tokens a second: faster than most people read

_MOST_BITS = 9.0  # a weight; beyond, a file is for converting rather than running
_USUAL_BITS = 4.85  # of Q4_K_M, which most people take
_LEAST_BITS = 4.0  # a weight; below, much is lost


@dataclass(frozen=True, slots=True)
class Resources:
    """What there is to run a model.

    memory   bytes that are free; None: the system does not say
    gpus     description, bytes `free` and `total` of each that a backend can use
    threads  of the CPU
    speeds   None: nobody wants to know how fast
    """

    memory: int | None
    gpus: Sequence[dict[str, Any]] = ()
    threads: int = field(default_factory=default_threads)
    speeds: Speeds | None = None

    @classmethod
    def of_this_machine(cls, *, threads: int | None = None, speeds: Speeds | None = None) -> Resources:
        """Return what is free now. The GPUs are those of the first backend that can use any; it may be started."""
        seen = (support.memory() for entry in BACKENDS if (support := entry.kind().gpus) is not None)
        return cls(free_memory(), next(filter(None, seen), []), threads or default_threads(), speeds)


@dataclass(frozen=True, slots=True)
class Fit:
    """One model on one machine.

    backend     that would run it, by its name in the registry
    bits        a weight, as the file has them
    context     tokens that the sums are for; the model was trained for `trained_context`, 0 where it does not say
    memory      bytes free for it; None: the system does not say
    gpu_layers  that would be offloaded, the output layer counted, of `layers`
    forecast    None if unknown: the backend has none, or a type of weight is not measured
    """

    architecture: str
    file_type: str
    file_bytes: int
    parameters: int
    bits: float
    backend: str
    context: int
    trained_context: int
    footprint: Footprint
    memory: int | None
    gpu_layers: int = 0
    layers: int = 0
    forecast: Forecast | None = None

    @property
    def needed(self) -> int:
        """Bytes of memory for what does not lie on a GPU, a mapped file's pages too."""
        whole = self.footprint.weights + self.footprint.cache.of(self.context)
        return round(self._share * whole) + self.footprint.scratch + self.footprint.vocabulary

    @property
    def fits(self) -> bool:
        """Whether it can be opened, as context_size.py has it: a mapped file need not be in memory."""
        return self.memory is None or self.needed - round(self._share * self.footprint.mapped) <= self.memory

    @property
    def in_memory(self) -> bool:
        """Whether all of it is in memory: or each token reads the rest from the disk."""
        return self.memory is None or self.needed <= self.memory

    @property
    def _share(self) -> float:
        """Of the model, that does not lie on a GPU."""
        return 1 - self.gpu_layers / self.layers if self.layers else 1.0


def fit_of(
    file: GGUFFile,
    resources: Resources,
    *,
    context: int | None = None,
    kv_type: str = "f16",
    prompt: int = DEFAULT_PROMPT,
) -> Fit:
    """Size up the model whose header this is: no tensor is read.

    context  tokens; None: DEFAULT_CONTEXT, or what the model was trained for if that is less
    Raises BadGGUF for metadata that cannot be.
    """
    architecture = file.string("general.architecture")
    trained = file.integer(f"{architecture}.context_length", 0, minimum=0)
    context = context or min(DEFAULT_CONTEXT, trained or DEFAULT_CONTEXT)
    options = OpenOptions(context_size=context, kv_type=kv_type, threads=resources.threads)
    parameters = parameter_count(file)
    on_gpus, gpu_layers, layers = _on_gpus(file, options, resources)
    forecast = None
    if on_gpus is not None:
        backend, footprint = on_gpus, on_gpus.kind().footprint(file, options)
    else:
        backend, footprint = _on_cpu(file, options)
        if resources.speeds is not None:
            forecast = backend.kind().forecast(file, options, resources.speeds, prompt)
    return Fit(
        architecture=architecture,
        file_type=common_type(file),
        file_bytes=file.file_bytes,
        parameters=parameters,
        bits=8 * sum(tensor.nbytes for tensor in file.tensors.values()) / max(1, parameters),
        backend=backend.name,
        context=context,
        trained_context=trained,
        footprint=footprint,
        memory=resources.memory,
        gpu_layers=gpu_layers,
        layers=layers,
        forecast=forecast,
    )


def best_of(fits: Sequence[Fit]) -> int | None:
    """The index of the quantization to choose: the most bits that answer fluently; where none does, the quickest one
    that has lost little. Where nobody knows how fast they are: the most bits that GPUs hold whole, or else what is
    nearest to the usual number of bits. None where none fits into memory."""
    fitting = [index for index, one in enumerate(fits) if one.in_memory and one.bits <= _MOST_BITS]
    if not fitting:
        return None
    if all(fits[index].forecast is None for index in fitting):
        whole = [index for index in fitting if fits[index].gpu_layers == fits[index].layers > 0]
        if whole:
            return max(whole, key=lambda index: fits[index].bits)
        return min(fitting, key=lambda index: abs(fits[index].bits - _USUAL_BITS))
    fluent = [index for index in fitting if _speed(fits[index]) >= FLUENT]
    if fluent:
        return max(fluent, key=lambda index: fits[index].bits)
    good = [index for index in fitting if fits[index].bits >= _LEAST_BITS]
    return min(good, key=lambda index: fits[index].bits) if good else max(fitting, key=lambda index: fits[index].bits)


def _speed(fit: Fit) -> float:
    return fit.forecast.decode_per_second if fit.forecast is not None else 0.0


def _on_gpus(file: GGUFFile, options: OpenOptions, resources: Resources) -> tuple[Entry | None, int, int]:
    """Return the backend that can put layers on GPUs, how many fit, and how many there are, with the output layer; the
    last is 0 on a machine without GPUs."""
    layers = 0
    free = [gpu["free"] for gpu in resources.gpus]
    for entry in BACKENDS if free else ():
        support = entry.kind().gpus
        if support is not None:
            fitting, layers = support.layers(file, options, free)
            if fitting:
                return entry, fitting, layers
    return None, 0, layers


def _on_cpu(file: GGUFFile, options: OpenOptions) -> tuple[Entry, Footprint]:
    """Return the first backend that runs the model, whether or not it is installed, and what it takes."""
    *others, last = BACKENDS
    for entry in others:
        try:
            return entry, entry.kind().footprint(file, options)
        except UnsupportedModel:
            continue
    return last, last.kind().footprint(file, options)
