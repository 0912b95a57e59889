"""Estimates whether a model fits on this machine and how fast it will run, from the GGUF header alone.

The estimate is for the backend that "auto" would choose (registry.py). Memory is computed in the same way as when the
backend opens the model.

The cost per token, in bytes and multiply-adds, is also computed here, from the plan. Rooflines compare this cost with
the machine's limits. Activations are ignored because they are small compared to the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from llmrun.backends.base import TRAINED_CONTEXT, OpenOptions
from llmrun.backends.cpu.lowering import StepShape, kv_position_bytes
from llmrun.backends.cpu.ops.registry import needs_of
from llmrun.backends.cpu.weights import PackedLayout
from llmrun.backends.experience import PREDICTED, RUNS, Experience
from llmrun.backends.registry import BACKENDS, Gpus, ImageCosts
from llmrun.backends.run_speeds import run_key
from llmrun.backends.sizing import KVBytes
from llmrun.base.errors import UnsupportedModel
from llmrun.base.machine.cpu_count import default_threads
from llmrun.base.machine.memory import free_memory
from llmrun.model.archs.parts.encoders import is_encoder
from llmrun.model.archs.parts.tensors import parameter_count, quantization
from llmrun.model.plan.ops.attention import Attention
from llmrun.model.plan.ops.linear import Product
from llmrun.model.plan.shapes import MatrixState

if TYPE_CHECKING:
    from llmrun.backends.cpu.speeds.forecast import Forecast
    from llmrun.backends.cpu.speeds.machine import Speeds
    from llmrun.backends.registry import Entry
    from llmrun.backends.sizing import Footprint
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.ops.base import Op
    from llmrun.model.plan.plan import Plan
    from llmrun.model.vision.projector import ProjectorFile


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


def needs_of_plan(plan: Plan, *, kv_type: str = "f16", packed: bool = True) -> ModelNeeds:
    """Return the cost per token.

    packed  True to count weights with their size in our engine's memory, or False to count the size in the file
    """
    one, unasked = StepShape(1), StepShape(1, wanted=0)
    shapes = [op.kv.shape for op in plan.ops if isinstance(op, Attention)]
    linear = [needs_of(op, kv_type, unasked) for op in plan.ops if isinstance(op, Product)]
    return ModelNeeds(
        weight_bytes=round(
            sum(needs_of(op, kv_type, one).weight_bytes * (1 if packed else _share_in_file(op)) for op in plan.ops)
        ),
        kv_read=KVBytes.of_layers(
            ((shape.window, kv_position_bytes(shape, kv_type)) for shape in shapes), states=_state_traffic(plan)
        ),
        products=sum(needs.products + needs.float_products for needs in linear),
    )


def _share_in_file(op: Op) -> float:
    """Return the size of an op's matrix in the file, as a share of its packed size."""
    return 1 if op.matrix is None else op.matrix.n_bytes / PackedLayout.of(op.matrix).n_bytes


def _state_traffic(plan: Plan) -> int:
    """Return how many bytes of recurrent states each token reads and writes in total."""
    shapes = [(group.shape, group.layers) for group in plan.states]
    return sum(2 * layers * shape.matrix_bytes for shape, layers in shapes if isinstance(shape, MatrixState))


DEFAULT_CONTEXT: Final = 4096  # tokens, enough for a fairly long chat
DEFAULT_PROMPT: Final = 512
FLUENT: Final = 10.0  # tokens per second, which is faster than most people read

_MOST_BITS = 9.0  # bits per weight; files with more bits are for conversion rather than for running
_USUAL_BITS = 4.85  # bits per weight of Q4_K_M, the most common choice
_LEAST_BITS = 4.0  # bits per weight; quality drops noticeably below this number


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of a machine for running models.

    memory   free memory in bytes, or None if the system does not report it
    gpus     the usable GPUs, each with its `description` and its `free` and `total` bytes
    threads  number of CPU threads
    speeds   measured speeds of the machine, or None if no forecast is wanted
    seen     the speeds of real runs, which replace and correct forecasts, or None to ignore them
    """

    memory: int | None
    gpus: Sequence[dict[str, Any]] = ()
    threads: int = field(default_factory=default_threads)
    speeds: Speeds | None = None
    seen: Experience | None = None

    @classmethod
    def of_this_machine(
        cls, *, threads: int | None = None, speeds: Speeds | None = None, options: OpenOptions | None = None
    ) -> Resources:
        """Return the resources that are currently free, including the GPUs of the first backend that can use GPUs.

        Looking for GPUs may start the backend's child process. Raises UsageError and NetworkError for the RPC servers
        in `options`, whose devices count as GPUs.
        """
        wanted = options or OpenOptions()
        seen = (support.memory(wanted) for entry in BACKENDS if (support := entry.kind().gpus) is not None)
        found = next(filter(None, seen), [])
        if Gpus(tuple(gpu["description"] for gpu in found)).are_software:
            found = []  # "auto" does not use software devices
        threads = threads or default_threads()
        return cls(free_memory(), found, threads, speeds, None if speeds is None else Experience(threads, speeds))

    @property
    def disturbance(self) -> str:
        """What disturbed the measurement of the speeds that were used, or ""."""
        return self.speeds.disturbance if self.speeds is not None else ""


class ProjectorHeader(NamedTuple):
    """The header of a projector's file, whose data may not be available, and what was read from it."""

    file: GGUFFile
    projector: ProjectorFile


@dataclass(frozen=True, slots=True)
class Fit:
    """How well one model fits on one machine.

    file_type        the quantization, such as "Q4_K_M"
    backend          name of the backend that would run the model
    bits             average bits per weight in the file
    context          context size in tokens that the estimate assumes
    trained_context  context size in tokens that the model was trained for, or 0 if unknown
    generates        True if the model generates text, or False for encoders
    memory           free memory in bytes, or None if the system does not report it
    gpu_layers       how many of the `layers` are on GPUs; both numbers include the output layer
    forecast         expected speed, or None if the backend has no forecast and the model has not run yet
    decode_origin, prefill_origin  the origins of the forecast's speeds (experience.py), or "" if unknown
    disturbance      what disturbed the measurement of this machine on which predicted speeds are based, or ""
    images           what images cost, or None if the model reads no images
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
    decode_origin: str = ""
    prefill_origin: str = ""
    disturbance: str = ""
    images: ImageCosts | None = None

    @property
    def vision(self) -> int:
        """The bytes that the vision projector and its activations need, or 0."""
        return 0 if self.images is None else self.images.memory

    @property
    def needed(self) -> int:
        """The main memory in bytes that the model uses, including pages of the mapped file but not GPU memory."""
        whole = self.footprint.weights + self.footprint.cache.of(self.context)
        return round(self._share * whole) + self.footprint.scratch + self.footprint.vocabulary + self.vision

    @property
    def fits(self) -> bool:
        """True if the model can be opened. As in sizing.py, pages of a mapped file are not counted."""
        return self.memory is None or self.needed - round(self._share * self.footprint.mapped) <= self.memory

    @property
    def in_memory(self) -> bool:
        """True if the whole model fits in memory. If not, the rest of the model is read from disk for each token."""
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
    kv_type: str | None = None,
    prompt: int = DEFAULT_PROMPT,
    projector: ProjectorHeader | ImageCosts | None = None,
) -> Fit:
    """Estimate how well a model fits the resources. Only the header is read, not the tensor data.

    context  context size in tokens, TRAINED_CONTEXT, or None for the smaller of DEFAULT_CONTEXT and the trained context
    kv_type  precision of the KV cache, or None for the backend's default
    projector  the projector, or what is known of its costs, or None if the model reads no images
    Raises BadGGUF for invalid metadata.
    """
    architecture = file.string("general.architecture")
    trained = file.integer(f"{architecture}.context_length", 0, minimum=0)
    if context == TRAINED_CONTEXT:
        context = trained
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
    origins = (PREDICTED, PREDICTED) if forecast is not None else ("", "")
    if resources.seen is not None:
        on_gpu = f"{gpu_layers}/{layers}" if gpu_layers else ""
        key = run_key(file.path, file.file_bytes, backend.name, on_gpu, resources.threads)
        forecast, decode_origin, prefill_origin = resources.seen.adjusted(key, forecast, prompt)
        origins = decode_origin, prefill_origin
    is_predicted = any(origin not in ("", RUNS) for origin in origins)
    return Fit(
        architecture=architecture,
        file_type=quantization(file),
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
        decode_origin=origins[0],
        prefill_origin=origins[1],
        disturbance=resources.disturbance if is_predicted else "",
        images=_image_costs(backend, projector, resources),
    )


def _image_costs(
    backend: Entry, projector: ProjectorHeader | ImageCosts | None, resources: Resources
) -> ImageCosts | None:
    """Return what images cost on the first of a backend and the backends after it that supports the projector."""
    if not isinstance(projector, ProjectorHeader):
        return projector
    *others, last = BACKENDS[BACKENDS.index(backend) :]
    for entry in others:
        try:
            return entry.kind().image_costs(*projector, resources.threads, resources.speeds)
        except UnsupportedModel:
            continue
    return last.kind().image_costs(*projector, resources.threads, resources.speeds)


def best_of(fits: Sequence[Fit]) -> int | None:
    """Return the index of the best quantization, or None if none fits in memory.

    If speeds are known, the best quantization is the one with the most bits that generates text at reading speed
    (FLUENT). If all quantizations are slower, the smallest quantization with at least 4 bits per weight is the best, or
    else the largest. If no speed is known, the quantization with the most bits that fits entirely on GPUs is the best,
    or else the closest to Q4_K_M. For encoders, which are small and read whole texts at once, more bits are better.
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

    Both numbers of layers include the output layer. The total is 0 on machines without GPUs.
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
