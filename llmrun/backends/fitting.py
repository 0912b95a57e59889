"""Estimates whether a model fits on this machine and how fast it will run, from the GGUF header alone.

The estimate is for the backend that "auto" would choose (select.py). Memory is computed in the same way as when the
backend opens the model.

The cost per token, in bytes and multiply-adds, is also computed here. Rooflines compare it with the machine's limits.
For our own engine, it is computed from the plan. For other backends, it is computed from the header, without norms.
Activations are ignored because they are small compared to the weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.lowering import StepShape, kv_position_bytes
from llmrun.backends.cpu.ops.registry import needs_of, needs_of_step
from llmrun.backends.registry import BACKENDS, Gpus
from llmrun.backends.sizing import (
    KVBytes,
    head_sizes,
    layer_memories,
    layer_windows,
    layers_of,
    layers_run,
    storing_layers,
)
from llmrun.base.errors import UnsupportedModel
from llmrun.base.machine.cpu_count import default_threads
from llmrun.base.machine.memory import free_memory
from llmrun.formats.layouts.kv import parse_kv_type
from llmrun.model.archs.parts.encoders import is_encoder
from llmrun.model.archs.parts.tensors import common_type, parameter_count
from llmrun.model.plan.ops.attention import Attention
from llmrun.model.plan.ops.linear import Product
from llmrun.model.plan.shapes import MatrixState

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.cpu.speeds.forecast import Forecast
    from llmrun.backends.cpu.speeds.machine import Speeds
    from llmrun.backends.registry import Entry
    from llmrun.backends.sizing import Footprint
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.formats.gguf.tensors import TensorInfo
    from llmrun.model.plan.plan import Plan

# Only one row per token is read from these tables, and it is not multiplied, so their cost is negligible.
_TABLES = re.compile(r"(^|[._])(token_embd|position_embd|token_types)\.weight$|tid2eid")
# Tensors of recurrent layers that have two dimensions in files but are multiplied element by element.
_ELEMENTWISE = re.compile(r"\.(ssm_a|ssm_d|ssm_conv1d\.weight|shortconv\.conv\.weight)$")
_OUTPUTS = ("output.weight", "token_embd.weight")  # without output.weight, token_embd.weight is also the output matrix
_LAYER = re.compile(r"blk\.(\d+)\.")
_EXPERTS = re.compile(r"blk\.(\d+)\..*_exps\.")


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """The cost of one token.

    weight_bytes  bytes of weights that decoding the token reads
    kv_read       bytes of keys, values and recurrent states that decoding the token reads or writes, as a function of
                  the number of tokens in the cache, including this one
    products      multiply-adds with weights when the token is prefilled without computing logits; attention is not
                  included because its multiply-adds are not int8
    """

    weight_bytes: int
    kv_read: KVBytes
    products: int


def needs_of_plan(plan: Plan, *, kv_type: str = "f16") -> ModelNeeds:
    """Return the cost per token on the CPU engine, counting weights with their packed size."""
    one, unasked = StepShape(1), StepShape(1, wanted=0)
    shapes = [op.kv.shape for op in plan.ops if isinstance(op, Attention)]
    linear = [needs_of(op, kv_type, unasked) for op in plan.ops if isinstance(op, Product)]
    return ModelNeeds(
        weight_bytes=needs_of_step(plan, kv_type, one).weight_bytes,
        kv_read=KVBytes.of_layers(
            ((shape.window, kv_position_bytes(shape, kv_type)) for shape in shapes), states=_state_traffic(plan)
        ),
        products=sum(needs.products + needs.float_products for needs in linear),
    )


def draft_shares(plan: Plan, head: Plan) -> tuple[float, float]:
    """Return the weights that a draft token and an additional row read, as shares of the bytes of a step of one row.

    Rows share all weights except those of experts: a second row usually has other experts.
    """
    one, two, draft = (
        needs_of_step(some, "f16", StepShape(rows, wanted=rows)).weight_bytes
        for some, rows in ((plan, 1), (plan, 2), (head, 1))
    )
    return draft / one, two / one - 1


def _state_traffic(plan: Plan) -> int:
    """Return the bytes of recurrent states that each token reads plus those that it writes."""
    shapes = [(group.shape, group.layers) for group in plan.states]
    return sum(2 * layers * shape.matrix_bytes for shape, layers in shapes if isinstance(shape, MatrixState))


def needs_of_file(file: GGUFFile, *, kv_type: str = "f16") -> ModelNeeds:
    """Return the cost per token, computed from the GGUF header alone. This works for any architecture.

    Matrices are counted with their size in the file. In a mixture of experts, only the experts that a token uses are
    counted. Raises BadGGUF for metadata of the wrong type.
    """
    tied = "output.weight" not in file.tensors
    idle, run = _idle(file), layers_run(file)
    matrices = [
        tensor
        for name, tensor in file.tensors.items()
        if len(tensor.shape) > 1 and _is_multiplied(tensor, tied) and _is_run(tensor, run) and name not in idle
    ]
    inner = [tensor for tensor in matrices if tensor.name not in _OUTPUTS]
    return ModelNeeds(
        weight_bytes=round(sum(tensor.nbytes * _share_used(file, tensor) for tensor in matrices)),
        kv_read=_kv_read(file, kv_type),
        products=round(sum(prod(tensor.shape) * _share_used(file, tensor) for tensor in inner)),
    )


def _idle(file: GGUFFile) -> set[str]:
    """Return the names of the key and value matrices in layers that reuse the cache of another layer."""
    return {f"blk.{n}.attn_{part}.weight" for n in range(storing_layers(file), layers_of(file)) for part in "kv"}


def _is_multiplied(tensor: TensorInfo, tied: bool) -> bool:
    if tensor.name == "token_embd.weight":
        return tied
    return not _TABLES.search(tensor.name) and not _ELEMENTWISE.search(tensor.name)


def _is_run(tensor: TensorInfo, layers: int) -> bool:
    found = _LAYER.match(tensor.name)
    return found is None or int(found[1]) < layers


def _share_used(file: GGUFFile, tensor: TensorInfo) -> Fraction:
    """Return the fraction of a tensor's weights that one token uses."""
    found = _EXPERTS.match(tensor.name)
    if found is None:
        return Fraction(1)
    architecture = file.string("general.architecture")
    experts = file.integer(f"{architecture}.expert_count", 0, minimum=0)
    used = int(_of_each_layer(file, f"{architecture}.expert_used_count", experts)[int(found[1])])
    return Fraction(used, experts) if used < experts else Fraction(1)


def _kv_read(file: GGUFFile, kv_type: str) -> KVBytes:
    architecture = file.string("general.architecture")
    key = f"{architecture}.attention.head_count"
    heads = _of_each_layer(file, key, 0)
    kv_heads = _of_each_layer(file, f"{key}_kv", heads)
    most = int(heads.max())
    size = file.integer(f"{architecture}.embedding_length", minimum=1) // most if most else 0
    windows = layer_windows(file, len(kv_heads))
    head_bytes = [parse_kv_type(kv_type).position_bytes(*sizes) for sizes in head_sizes(file, windows, size)]
    memories = layer_memories(file)
    kv = kv_heads * head_bytes * [memory.attends for memory in memories]
    layers = list(zip(windows, kv.tolist(), strict=True))
    return KVBytes.of_layers(layers[: layers_run(file)], states=2 * sum(memory.matrices for memory in memories))


def _of_each_layer(file: GGUFFile, key: str, default: int | NDArray[np.int64]) -> NDArray[np.int64]:
    """Read a per-layer number as int64[layers]. The file may contain one number for all layers, or an array."""
    layers = layers_of(file)
    if isinstance(file.metadata.get(key), np.ndarray):
        return np.resize(file.integers(key).astype(np.int64), layers)
    return np.broadcast_to(np.asarray(file.integer(key, default), np.int64), layers)


DEFAULT_CONTEXT: Final = 4096  # tokens, enough for a fairly long chat
DEFAULT_PROMPT: Final = 512
FLUENT: Final = 10.0  # tokens per second, which is faster than most people read

_MOST_BITS = 9.0  # bits per weight; files with more are meant for conversion rather than for running
_USUAL_BITS = 4.85  # bits per weight of Q4_K_M, the most common choice
_LEAST_BITS = 4.0  # bits per weight; quality drops noticeably below this


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that a machine has for running models.

    memory   free memory in bytes, or None if the system does not report it
    gpus     the usable GPUs, each with its `description` and its `free` and `total` bytes
    threads  number of CPU threads
    speeds   measured speeds of the machine, or None if no forecast is wanted
    """

    memory: int | None
    gpus: Sequence[dict[str, Any]] = ()
    threads: int = field(default_factory=default_threads)
    speeds: Speeds | None = None

    @classmethod
    def of_this_machine(
        cls, *, threads: int | None = None, speeds: Speeds | None = None, options: OpenOptions | None = None
    ) -> Resources:
        """Return the resources that are currently free. The GPUs are those of the first backend that can use any.

        Looking for GPUs may start the backend's child process. Raises UsageError and NetworkError for the RPC servers
        in `options`, whose devices count as GPUs.
        """
        wanted = options or OpenOptions()
        seen = (support.memory(wanted) for entry in BACKENDS if (support := entry.kind().gpus) is not None)
        found = next(filter(None, seen), [])
        if Gpus(tuple(gpu["description"] for gpu in found)).are_software:
            found = []  # "auto" does not use them
        return cls(free_memory(), found, threads or default_threads(), speeds)


@dataclass(frozen=True, slots=True)
class Fit:
    """How well one model fits on one machine.

    backend          name of the backend that would run the model
    bits             average bits per weight in the file
    context          context size in tokens that the estimate assumes
    trained_context  context size in tokens that the model was trained for, or 0 if unknown
    generates        whether the model generates text; encoders do not
    memory           free memory in bytes, or None if the system does not report it
    gpu_layers       how many of the `layers` are on GPUs; both numbers include the output layer
    forecast         expected speed, or None if the backend has no forecast or a weight type was not measured
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
    generates: bool = True

    @property
    def needed(self) -> int:
        """The main memory in bytes that the model uses, including pages of the mapped file but not GPU memory."""
        whole = self.footprint.weights + self.footprint.cache.of(self.context)
        return round(self._share * whole) + self.footprint.scratch + self.footprint.vocabulary

    @property
    def fits(self) -> bool:
        """True if the model can be opened. As in sizing.py, pages of a mapped file do not count."""
        return self.memory is None or self.needed - round(self._share * self.footprint.mapped) <= self.memory

    @property
    def in_memory(self) -> bool:
        """True if the whole model fits in memory. If not, generating each token reads the rest from disk."""
        return self.memory is None or self.needed <= self.memory

    @property
    def _share(self) -> float:
        """The fraction of the model that stays in main memory."""
        return 1 - self.gpu_layers / self.layers if self.layers else 1.0


def fit_of(
    file: GGUFFile,
    resources: Resources,
    *,
    context: int | None = None,
    kv_type: str = "f16",
    prompt: int = DEFAULT_PROMPT,
) -> Fit:
    """Estimate how well a model fits the resources. This reads the header but no tensor data.

    context  context size in tokens, or None for the smaller of DEFAULT_CONTEXT and the trained context
    Raises BadGGUF for invalid metadata.
    """
    architecture = file.string("general.architecture")
    trained = file.integer(f"{architecture}.context_length", 0, minimum=0)
    context = context or min(DEFAULT_CONTEXT, trained or DEFAULT_CONTEXT)
    options = OpenOptions(context_size=context, kv_type=kv_type, threads=resources.threads, draft_head=True)
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
        generates=not is_encoder(file),
    )


def best_of(fits: Sequence[Fit]) -> int | None:
    """Return the index of the best quantization, or None if none fits in memory.

    If speeds are known, the best quantization is the one with the most bits that generates text at reading speed
    (FLUENT). If all are slower, it is the smallest one with at least 4 bits per weight, or else the largest one. If no
    speed is known, it is the one with the most bits that fits entirely on GPUs, or else the one closest to Q4_K_M. For
    encoders, which are small and read whole texts at once, it is always the one with the most bits.
    """
    fitting = [index for index, one in enumerate(fits) if one.in_memory and one.bits <= _MOST_BITS]
    if not fitting:
        return None
    if not all(fits[index].generates for index in fitting):
        return max(fitting, key=lambda index: fits[index].bits)
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
    return (fit.forecast.decode_per_second or 0.0) if fit.forecast is not None else 0.0


def _on_gpus(file: GGUFFile, options: OpenOptions, resources: Resources) -> tuple[Entry | None, int, int]:
    """Return (backend, layers on GPUs, total layers). The backend is None if no backend can use the GPUs.

    Both numbers include the output layer. The total is 0 on machines without GPUs.
    """
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
    """Return the first backend that supports the model, even if it is not installed, and its footprint."""
    *others, last = BACKENDS
    for entry in others:
        try:
            return entry, entry.kind().footprint(file, options)
        except UnsupportedModel:
            continue
    return last, last.kind().footprint(file, options)
