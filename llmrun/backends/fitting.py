"""Whether a model fits this machine, and how fast it would be, by its header alone: nothing is fetched or loaded.

The backend is the one that `auto` would choose (select.py), and the sums are those that it is opened by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from llmrun.archs.parts.tensors import common_type, parameter_count
from llmrun.archs.registry import plan_of_header
from llmrun.backends.llama.footprint import footprint_on_llama
from llmrun.backends.llama.gpu_layers import cache_by_context, layer_sizes, layers_that_fit
from llmrun.errors import UnsupportedModel
from llmrun.machine.cpu_count import default_threads
from llmrun.machine.free_memory import free_memory

if TYPE_CHECKING:
    from llmrun.backends.cpu.speeds.forecast import Forecast
    from llmrun.backends.cpu.speeds.machine import Speeds
    from llmrun.backends.sizing.footprint import Footprint
    from llmrun.gguf.reader import GGUFFile
    from llmrun.plan.plan import Plan

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
    gpus     description, bytes `free` and `total` of each that llama.cpp can use
    threads  of our own engine
    speeds   None: nobody wants to know how fast
    """

    memory: int | None
    gpus: Sequence[dict[str, Any]] = ()
    threads: int = field(default_factory=default_threads)
    speeds: Speeds | None = None

    @classmethod
    def of_this_machine(cls, *, threads: int | None = None, speeds: Speeds | None = None) -> Resources:
        """What is free now. Starts llama.cpp where it can use GPUs."""
        from llmrun.backends.llama.probe import usable_gpus

        return cls(free_memory(), usable_gpus(), threads or default_threads(), speeds)


@dataclass(frozen=True, slots=True)
class Fit:
    """One model on one machine.

    backend     that would run it: "cpu" or "llama"
    bits        a weight, as the file has them
    context     tokens that the sums are for; the model was trained for `trained_context`, 0 where it does not say
    memory      bytes free for it; None: the system does not say
    gpu_layers  that would be offloaded, the output layer counted, of `layers`
    forecast    None where nobody knows: llama.cpp runs it, or a type of weight is not measured
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
    """Of the model whose header this is: no tensor is read.

    context  tokens; None: DEFAULT_CONTEXT, or what the model was trained for if that is less
    Raises BadGGUF for metadata that cannot be.
    """
    architecture = file.string("general.architecture")
    trained = file.integer(f"{architecture}.context_length", 0, minimum=0)
    context = context or min(DEFAULT_CONTEXT, trained or DEFAULT_CONTEXT)
    parameters = parameter_count(file)
    gpu_layers, layers = _on_gpus(file, resources, context, kv_type)
    plan = None if gpu_layers else _plan_of(file)
    return Fit(
        architecture=architecture,
        file_type=common_type(file),
        file_bytes=file.file_bytes,
        parameters=parameters,
        bits=8 * sum(tensor.nbytes for tensor in file.tensors.values()) / max(1, parameters),
        backend="llama" if plan is None else "cpu",
        context=context,
        trained_context=trained,
        footprint=_footprint(file, plan, resources, context, kv_type),
        memory=resources.memory,
        gpu_layers=gpu_layers,
        layers=layers,
        forecast=_forecast(file, plan, resources, kv_type, prompt),
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


def _on_gpus(file: GGUFFile, resources: Resources, context: int, kv_type: str) -> tuple[int, int]:
    """(layers that fit, layers there are, the output layer counted); none of none without a GPU."""
    if not resources.gpus:
        return 0, 0
    sizes = layer_sizes(file, context, kv_type)
    return layers_that_fit(sizes, [gpu["free"] for gpu in resources.gpus]), len(sizes.layers) + 1


def _plan_of(file: GGUFFile) -> Plan | None:
    """For our own engine; None for what it does not run."""
    from llmrun.tokenizers.registry import tokenizer_kernels

    try:
        tokenizer_kernels(file)  # as it may refuse the vocabulary
        return plan_of_header(file)
    except UnsupportedModel:
        return None


def _footprint(file: GGUFFile, plan: Plan | None, resources: Resources, context: int, kv_type: str) -> Footprint:
    if plan is None:
        return footprint_on_llama(file, cache=cache_by_context(file, kv_type))
    from llmrun.backends.cpu.backend import MAX_ROWS
    from llmrun.backends.cpu.footprint import footprint_on_cpu

    return footprint_on_cpu(
        file, plan, max_sequences=1, kv_type=kv_type, max_rows=MAX_ROWS, n_threads=resources.threads
    )


def _forecast(file: GGUFFile, plan: Plan | None, resources: Resources, kv_type: str, prompt: int) -> Forecast | None:
    if plan is None or resources.speeds is None:
        return None
    from llmrun.backends.cpu.backend import MAX_ROWS
    from llmrun.backends.cpu.speeds.forecast import forecast_on_cpu

    return forecast_on_cpu(
        plan,
        resources.speeds,
        vocabulary_size=len(file.strings("tokenizer.ggml.tokens")),
        prompt=prompt,
        kv_type=kv_type,
        max_rows=MAX_ROWS,
    )
