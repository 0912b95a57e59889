"""Chooses the context size and the number of GPU layers for a model on llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmrun.backends.kind import NoRoomOnGpu
from llmrun.backends.llama.footprint import footprint_on_llama
from llmrun.backends.llama.gpu_layers import (
    ALL_LAYERS,
    LayerSizes,
    cache_by_context,
    cache_bytes,
    layer_sizes,
    layers_that_fit,
)
from llmrun.backends.sizing.context_size import LARGEST_DEFAULT, LARGEST_FILLED_DEFAULT, MemoryNeeds, context_for
from llmrun.backends.sizing.kv_bytes import KVBytes
from llmrun.backends.sizing.layers_kept import layers_of
from llmrun.base.amounts import counted, format_mebibytes
from llmrun.base.errors import UsageError
from llmrun.base.machine.free_memory import free_memory
from llmrun.formats.gguf.problems import shown
from llmrun.model.archs.parts.tensors import parameter_count

if TYPE_CHECKING:
    from llmrun.formats.gguf.adapter import AdapterFile
    from llmrun.formats.gguf.reader import GGUFFile


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement that the user requested.

    context_size   tokens per sequence, or None for a sensible default
    max_sequences  maximum number of sequences in the cache
    kv_type        precision of the cache, in the notation of layouts/kv_types.py
    gpu_layers     number of layers on GPUs, ALL_LAYERS for all, or None for as many as fit
    cache_tokens   capacity of the cache for all sequences together, or None for a full context per sequence
    tensor_split   the proportion of the layers for each device, or () for proportions of the free memory
    split_mode     how to divide the model among devices, one of SPLIT_MODES
    main_gpu       the number of the device for all layers if `split_mode` is "none"
    """

    context_size: int | None
    max_sequences: int
    kv_type: str
    gpu_layers: int | None
    cache_tokens: int | None
    tensor_split: tuple[float, ...] = ()
    split_mode: str = "layer"
    main_gpu: int = 0

    def tokens_with(self, context_size: int) -> int:
        return self.cache_tokens or context_size * self.max_sequences

    def sizes_with(self, file: GGUFFile, context_size: int) -> LayerSizes:
        return layer_sizes(file, self.tokens_with(context_size), self.kv_type, max_sequences=self.max_sequences)

    def used(self, devices: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Return those of llama.cpp's devices that will have layers. Raises UsageError if there are fewer than asked.

        Without any device, all layers run on the CPU, so there is nothing to check.
        """
        if not devices:
            return devices
        if self.tensor_split and len(self.tensor_split) != len(devices):
            raise UsageError(
                f"--tensor-split: {counted(len(self.tensor_split), 'number')} for "
                f"{counted(len(devices), 'device')}: {_names(devices)}",
                hint="give one number for each device, and 0 for a device that should have no layers",
            )
        if self.split_mode != "none":
            return devices
        if self.main_gpu >= len(devices):
            raise UsageError(
                f"--main-gpu: {self.main_gpu} is not one of llama.cpp's devices, which are numbered from 0: "
                f"{_names(devices)}"
            )
        return [devices[self.main_gpu]]


def decide_placement(
    asked: Placement,
    file: GGUFFile,
    adapters: Sequence[AdapterFile],
    train_context: int,
    devices: Callable[[], Sequence[dict[str, Any]]],
) -> tuple[int, int]:
    """Choose the context size in tokens and the number of GPU layers, and return both.

    devices  returns the usable GPUs; called only if a GPU may be used
    Raises DoesNotFit, and UsageError if the devices are not those that `asked` divides the model among. Raises
    NoRoomOnGpu if `asked.gpu_layers` is None and no layer fits.
    """
    if asked.gpu_layers == 0:
        return _context_in_memory(asked, file, adapters, train_context), 0
    found = asked.used(devices())
    if not found and asked.gpu_layers is not None:  # all layers then run on the CPU
        return _context_in_memory(asked, file, adapters, train_context), asked.gpu_layers
    known = all(device["total"] for device in found)  # Drivers that do not know the memory size report 0 bytes.
    free = [device["free"] for device in found] if known else []

    def fitting(context_size: int) -> int:
        return layers_that_fit(asked.sizes_with(file, context_size), free, asked.tensor_split)

    context_size = asked.context_size or _context_on_gpus(fitting, train_context, asked.gpu_layers)
    gpu_layers = fitting(context_size) if asked.gpu_layers is None else asked.gpu_layers
    if gpu_layers == 0:
        raise NoRoomOnGpu(_no_room(found))
    on_cpu = 0 if gpu_layers == ALL_LAYERS else layers_of(file) + 1 - gpu_layers
    if on_cpu > 0:
        context_size = _context_in_memory(asked, file, adapters, context_size, layers=on_cpu)
    return context_size, gpu_layers


def _context_in_memory(
    asked: Placement, file: GGUFFile, adapters: Sequence[AdapterFile], train_context: int, layers: int | None = None
) -> int:
    """Return the context size for a model in main memory. Raises DoesNotFit.

    layers  the number of layers in main memory if the others are on GPUs; `train_context` is then the largest default

    llama.cpp fills its whole cache with zeros when it opens the model. If the system has overcommitted its memory, it
    kills the process at that point, so this function checks the size beforehand.
    """
    cache = cache_by_context(file, asked.kv_type, max_sequences=asked.max_sequences, layers=layers)
    if asked.cache_tokens is not None:
        n_bytes = cache_bytes(file, asked.cache_tokens, asked.kv_type, max_sequences=asked.max_sequences, layers=layers)
        cache = KVBytes(0, ((1, n_bytes),))  # The cache size does not depend on the context size.
    footprint = footprint_on_llama(file, adapters, cache=cache, layers=layers)
    # The number of parameters is for a hint about the whole model, so a part of it has none.
    return context_for(
        asked.context_size,
        train_context=train_context,
        largest_default=LARGEST_FILLED_DEFAULT if layers is None else LARGEST_DEFAULT,
        needs=MemoryNeeds(footprint, free_memory(), parameter_count(file) if layers is None else 0),
        kv_type=asked.kv_type,
        path=str(file.path),
    )


def _context_on_gpus(fitting: Callable[[int], int], train_context: int, gpu_layers: int | None) -> int:
    """Return the largest default context size that does not push any layer from the GPUs to the CPU."""
    wanted = max(1, fitting(0))
    if gpu_layers is not None and gpu_layers != ALL_LAYERS:
        wanted = min(wanted, gpu_layers)
    context_size = min(train_context, LARGEST_DEFAULT)
    while context_size > LARGEST_FILLED_DEFAULT and fitting(context_size) < wanted:
        context_size = max(context_size // 2, LARGEST_FILLED_DEFAULT)
    return context_size


def _no_room(devices: Sequence[dict[str, Any]]) -> str:
    if not devices:
        return "llama.cpp found no GPU"
    memory = [f"{_name(device)}: {format_mebibytes(device['free'])}" for device in devices]
    return f"no layer fits in the free GPU memory: {', '.join(memory)}"


def _names(devices: Sequence[dict[str, Any]]) -> str:
    return ", ".join(_name(device) for device in devices)


def _name(device: dict[str, Any]) -> str:
    return shown(device["description"])
