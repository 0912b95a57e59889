"""Computes the memory that a model needs on llama.cpp, and chooses its context size and number of GPU layers.

llama.cpp offloads the output layer first and then the last layers. llama.cpp divides the layers among the GPUs in
proportion to their free memory, or in the user's proportions. llama.cpp does not compute how many layers fit, so this
module computes the number for "auto". Devices of RPC servers count as GPUs, because each server reports its free
memory.

Main memory is counted for llama.cpp and the llmrun process together.
"""

from __future__ import annotations

import platform
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from llmrun.backends.base import AUTO, parse_tensor_split
from llmrun.backends.llama.messages import MOST_WANTED
from llmrun.backends.registry import NoRoomOnGpu
from llmrun.backends.sizing import (
    CLIENT_PROCESS,
    LARGEST_DEFAULT,
    LARGEST_FILLED_DEFAULT,
    LLAMA_PROCESS,
    Footprint,
    KVBytes,
    MemoryNeeds,
    context_for,
    encoder_gpu_bytes,
    head_sizes,
    header_bytes,
    layer_memories,
    layer_windows,
    layers_of,
    layers_run,
    rows_in_one_step,
    storing_layers,
    vocabulary_bytes,
    widest_input,
    with_encoder,
)
from llmrun.base.amounts import counted, format_mebibytes
from llmrun.base.errors import UsageError, shown
from llmrun.base.machine.memory import free_memory
from llmrun.base.machine.processor import processor_flags
from llmrun.formats.layouts.arena import round_up
from llmrun.formats.layouts.kv import F16, parse_kv_type
from llmrun.model.archs.parts.encoders import has_no_cache, is_encoder
from llmrun.model.archs.parts.tensors import parameter_count

if TYPE_CHECKING:
    from llmrun.backends.base import OpenOptions
    from llmrun.formats.gguf.adapter import AdapterFile
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.formats.gguf.tensors import TensorInfo
    from llmrun.model.vision.projector import ProjectorFile

ALL_LAYERS = -1  # the value that means all layers where a number of layers is expected

_MARGIN = 1 << 30  # bytes left free on each GPU for other programs and uncounted buffers; llama.cpp's own margin
_ROWS = 512  # rows that llama.cpp computes in one batch
_CACHE_STEP = 256  # tokens; llama.cpp rounds the cache of a sliding window up to a multiple of this number
_EMBEDDINGS = "token_embd.weight"
_LOOKED_UP = frozenset({"per_layer_token_embd.weight", "position_embd.weight", "token_types.weight"})
_WITH_THE_FIRST_LAYER = frozenset({"per_layer_model_proj.weight", "per_layer_proj_norm.weight"})
_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The GPU memory that the parts of a model need, in bytes.

    layers     size of each layer, including its part of the KV cache and its recurrent states
    output     size of the output layer
    computing  size of the compute buffers on each GPU that has a layer
    visiting   size of the largest matrix, because llama.cpp copies the matrices of CPU layers to a GPU one at a time
               for each batch of a long prompt
    """

    layers: tuple[int, ...]
    output: int
    computing: int
    visiting: int


def layer_sizes(
    file: GGUFFile, cache_tokens: int, kv_type: str = "f16", *, max_sequences: int = 1, rows: int = _ROWS
) -> LayerSizes:
    """Return the GPU memory that llama.cpp will need for a model.

    cache_tokens  capacity of the KV cache for all sequences together
    rows          as returned by `rows_at_once`
    """
    architecture = file.string("general.architecture")
    run = layers_run(file)
    layers = _layer_caches(file, cache_tokens, kv_type, max_sequences, rows)
    # Lookup tables stay on the CPU. If the embedding table is also the output matrix, llama.cpp copies it to a GPU.
    at_the_input = _LOOKED_UP | ({_EMBEDDINGS} if "output.weight" in file.tensors else frozenset())
    output = visiting = 0
    for name, tensor in file.tensors.items():
        layer = _LAYER.match(name)
        if name in _WITH_THE_FIRST_LAYER:
            layers[0] += tensor.nbytes
        elif layer is None:
            output += 0 if name in at_the_input else tensor.nbytes
        elif int(layer[1]) < run:
            layers[int(layer[1])] += tensor.nbytes
            visiting = max(visiting, tensor.nbytes)
    width, inner = _widths(file)
    heads = _largest(file, f"{architecture}.attention.head_count", 32)
    vocabulary = file.tensors[_EMBEDDINGS].n_rows if _EMBEDDINGS in file.tensors else 0
    rows = max(rows, cache_tokens) if is_encoder(file) else rows
    activations = 4 * rows * (6 * width + 3 * inner + 4 * _of_all_layers(file)) + 4 * MOST_WANTED * vocabulary
    scores = 4 * rows * heads * min(cache_tokens, 8192)  # attention scores are needed only without flash attention
    return LayerSizes(tuple(layers), output, activations + scores, visiting)


def rows_at_once(projector: ProjectorFile | None) -> int:
    """Return how many rows llama.cpp computes in one batch."""
    return max(_ROWS, rows_in_one_step(projector))


def beside_encoder(free: Sequence[int], projector: ProjectorFile | None) -> list[int]:
    """Return the free bytes on each GPU besides the vision encoder, for which libmtmd uses the first GPU."""
    return [max(0, free[0] - encoder_gpu_bytes(projector)), *free[1:]] if projector is not None and free else list(free)


def resident_activations(file: GGUFFile, rows: int = _ROWS) -> int:
    """Return how many bytes of activations llama.cpp touches in main memory for a long prompt.

    On a GPU, by contrast, the whole reserved buffer is counted.

    rows  as returned by `rows_at_once`
    """
    return rows * row_bytes(file)


def row_bytes(file: GGUFFile) -> int:
    """Return how many bytes of activations llama.cpp touches in main memory for each row of a batch."""
    width, inner = _widths(file)
    of_layers, recurrent = _of_all_layers(file), widest_input(file)
    # Besides four times the width, we measured 3.0 to 3.2 times the input of a delta net, and 2.5 to 3.0 with Mamba.
    of_recurrent = 3 * recurrent + 4 * width if recurrent else 0
    return 4 * max(4 * of_layers, of_layers + 3 * width + 2 * inner, of_recurrent)


def _of_all_layers(file: GGUFFile) -> int:
    """Return the number of per-layer embedding features of a token, summed over all layers (Gemma 3n and 4).

    llama.cpp's compute buffer temporarily contains four copies of these features. We measured 2.00 MiB more for
    each additional layer of 256 features.
    """
    table = file.tensors.get("per_layer_token_embd.weight")
    return 0 if table is None else table.shape[0]


def cache_bytes(
    file: GGUFFile,
    cache_tokens: int,
    kv_type: str = "f16",
    *,
    max_sequences: int = 1,
    layers: int | None = None,
    rows: int = _ROWS,
) -> int:
    """Return the size in bytes of llama.cpp's KV cache and recurrent states.

    cache_tokens  capacity of the cache for all sequences together
    layers        the number of layers to count from the first, or None for all layers
    rows          as returned by `rows_at_once`
    """
    return sum(_layer_caches(file, cache_tokens, kv_type, max_sequences, rows)[:layers])


def cache_by_context(
    file: GGUFFile, kv_type: str = "f16", *, max_sequences: int = 1, layers: int | None = None, rows: int = _ROWS
) -> KVBytes:
    """Return the size of llama.cpp's cache, with recurrent states, as a function of each sequence's context size.

    layers  the number of layers to count from the first, or None for all layers
    rows    as returned by `rows_at_once`
    """
    windows = layer_windows(file, layers_of(file))
    most = [-(-_window_tokens(window, max_sequences, rows) // max_sequences) if window else 0 for window in windows]
    kv = [max_sequences * n_bytes for n_bytes in _kv_bytes(file, kv_type)]
    return KVBytes.of_layers(
        list(zip(most, kv, strict=True))[:layers],
        states=max_sequences * sum(memory.state_bytes for memory in layer_memories(file)[:layers]),
    )


def _layer_caches(file: GGUFFile, cache_tokens: int, kv_type: str, max_sequences: int, rows: int) -> list[int]:
    """Return the size in bytes of each layer's KV cache and recurrent states."""
    windows = layer_windows(file, layers_of(file))
    tokens = [
        min(cache_tokens, _window_tokens(window, max_sequences, rows)) if window else cache_tokens for window in windows
    ]
    kv, states = _kv_bytes(file, kv_type), [max_sequences * memory.state_bytes for memory in layer_memories(file)]
    return [size * n + state for size, n, state in zip(kv, tokens, states, strict=True)]


def _window_tokens(window: int, max_sequences: int, rows: int) -> int:
    """Return the cache capacity of a sliding-window layer: one window per sequence, plus the rows of one batch."""
    return round_up(window * max_sequences + rows, _CACHE_STEP)


def layers_that_fit(sizes: LayerSizes, free: Sequence[int], split: Sequence[float] = ()) -> int:
    """Return the largest value of llama.cpp's `n_gpu_layers` that fits. The output layer counts as one layer.

    free   free bytes on each GPU, including the safety margin that must stay free
    split  the proportion of the layers for each GPU; by default, the proportion of the free memory
    """
    usable = [max(0, n - _MARGIN) for n in free]
    if not any(usable):
        return 0
    for n_layers in range(len(sizes.layers) + 1, 0, -1):
        needed = bytes_needed(sizes, split or free, n_layers)
        if all(need <= room for need, room in zip(needed, usable, strict=True)):
            return n_layers
    return 0


def bytes_needed(sizes: LayerSizes, split: Sequence[float], n_layers: int) -> list[int]:
    """Return the bytes needed on each GPU if `n_layers` layers are offloaded and divided as in llama.cpp.

    split  the proportion of the layers for each GPU
    """
    needed = [0] * len(split)
    total = sum(split)
    bounds = [part / total for part in accumulate(split)]
    everything = [*sizes.layers, sizes.output]
    for index, size in enumerate(everything[len(everything) - n_layers :]):
        gpu = min(bisect_right(bounds, index / n_layers), len(split) - 1)
        needed[gpu] += size
    besides = sizes.computing + (sizes.visiting if n_layers < len(everything) else 0)
    return [need + besides if need else 0 for need in needed]


def _kv_bytes(file: GGUFFile, kv_type: str) -> list[int]:
    """Return the KV cache size of each layer in bytes per token.

    The size is 0 for layers that reuse another layer's cache, recurrent layers without attention, and most encoders.
    """
    architecture, n_layers = file.string("general.architecture"), layers_of(file)
    if has_no_cache(file):
        return [0] * n_layers
    heads = _per_layer(file, f"{architecture}.attention.head_count", n_layers, 32)
    kv_heads = _per_layer(file, f"{architecture}.attention.head_count_kv", n_layers, max(heads))
    size = file.integer(f"{architecture}.embedding_length", 4096) // max(1, *heads)
    sizes = head_sizes(file, layer_windows(file, n_layers), size)
    most, types = _most_rows(file, n_layers), parse_kv_type(kv_type)
    widths = [[min(count * n, rows) for n in of] for count, of, rows in zip(kv_heads, sizes, most, strict=True)]
    storing = storing_layers(file)
    return [
        types.position_bytes(*width) if layer < storing and memory.attends else 0
        for layer, (width, memory) in enumerate(zip(widths, layer_memories(file), strict=True))
    ]


def _most_rows(file: GGUFFile, n_layers: int) -> list[int]:
    """Return the number of rows of each layer's largest matrix, an upper bound for the features of keys and values.

    llama.cpp rejects files whose metadata claims more features than this bound. Without the bound, we would report such
    files as too large before llama.cpp could report the real problem.
    """
    most = [0] * n_layers
    for name, tensor in file.tensors.items():
        layer = _LAYER.match(name)
        if layer is not None and int(layer[1]) < n_layers:
            most[int(layer[1])] = max(most[int(layer[1])], tensor.n_rows)
    return most


def _per_layer(file: GGUFFile, key: str, n_layers: int, default: int) -> list[int]:
    """Read a number for each layer. The file may contain one value for all layers, or an array."""
    value = file.metadata.get(key, default)
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and len(value) >= n_layers:
        return [int(number) for number in value[:n_layers]]
    return [value if isinstance(value, int) else default] * n_layers


def _widths(file: GGUFFile) -> tuple[int, int]:
    """Return the widths of the activations between layers and inside a layer.

    Neither width exceeds the largest dimension of a tensor, regardless of the metadata.
    """
    architecture = file.string("general.architecture")
    widest = max((max(tensor.shape) for tensor in file.tensors.values()), default=0)
    width = file.integer(f"{architecture}.embedding_length", 4096)
    inner = _largest(file, f"{architecture}.feed_forward_length", 4 * width)
    return min(width, widest), min(inner, widest)


def _largest(file: GGUFFile, key: str, default: int) -> int:
    return max(_per_layer(file, key, 1, default))


def footprint_on_llama(
    file: GGUFFile,
    adapters: Iterable[AdapterFile] = (),
    *,
    cache: KVBytes,
    kv_type: str = "f16",
    layers: int | None = None,
    projector: ProjectorFile | None = None,
    encodes_on_gpu: bool = False,
) -> Footprint:
    """Return the footprint of a model with LoRA adapters and a projector on llama.cpp.

    llama.cpp maps the file, and copies matrices of some types into the layout that its kernels need. The matrices of
    adapters are read into separate memory.

    cache    bytes of the KV cache as a function of the context size
    kv_type  the type of the KV cache
    layers   the number of layers that stay in main memory while the others are on GPUs, or None without a GPU
    projector  the projector, or None if the model reads no images
    encodes_on_gpu  whether the encoder is on a GPU
    """
    scratch = resident_activations(file, rows_at_once(projector))
    if is_encoder(file):
        # The batch has as many rows as the context. llama.cpp also reserves and clears logits, but never computes them.
        vocabulary = len(file.strings("tokenizer.ggml.tokens"))
        scratch, cache = 0, replace(cache, token=cache.token + row_bytes(file) + 4 * vocabulary)
    tensors, mapped = list(file.tensors.values()), file.file_bytes
    if layers is not None:  # the output matrix is on a GPU, and only a few rows of the embeddings are ever read
        tensors = [tensor for tensor in tensors if (of := _LAYER.match(tensor.name)) and int(of[1]) < layers]
        mapped = sum(tensor.nbytes for tensor in tensors)
    repacked = sum(tensor.nbytes for tensor in tensors if _is_repacked(tensor, file))
    weights = mapped + repacked + sum(adapter.nbytes for adapter in adapters)
    if projector is not None:
        scratch += _checkpoint_bytes(file)
    footprint = Footprint(
        weights=weights,
        mapped=mapped,
        cache=cache,
        scratch=scratch,
        vocabulary=2 * vocabulary_bytes(file),
        header=header_bytes(file),
        programs=CLIENT_PROCESS + LLAMA_PROCESS,
        kv_type=kv_type,
    )
    return with_encoder(footprint, projector, file, on_gpu=encodes_on_gpu)


def _checkpoint_bytes(file: GGUFFile) -> int:
    """Return the size of the recurrent states that are kept after images, which are always in main memory."""
    n_bytes = sum(memory.state_bytes for memory in layer_memories(file))
    if not n_bytes:
        return 0
    from llmrun.backends.llama.state_checkpoints import n_checkpoints

    return n_checkpoints(n_bytes) * n_bytes


# repack.cpp in ggml repacks matrices into groups of 8 rows.
_ROWS_AT_ONCE = 8


def _is_repacked(tensor: TensorInfo, file: GGUFFile) -> bool:
    """Return whether llama.cpp makes a repacked copy of a matrix in addition to the mapped file (repack.cpp)."""
    is_matrix = len(tensor.shape) > 1 and tensor.shape[1] % _ROWS_AT_ONCE == 0
    is_multiplied = tensor.name != _EMBEDDINGS or "output.weight" not in file.tensors
    return is_matrix and is_multiplied and tensor.type.name in _repacked_types()


def _repacked_types() -> frozenset[str]:
    if platform.machine() in ("aarch64", "arm64"):
        return frozenset({"Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4"})
    types = frozenset({"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"})  # Repacking these types requires AVX2, which we assume.
    return types | {"Q2_K"} if "avx512f" in processor_flags() else types


def kv_type_of(options: OpenOptions) -> str:
    """Return the type of the KV cache.

    The default is f16, as in llama.cpp, because we have measured q8_0 only on our engine.
    """
    return options.kv_type or F16.name


def tokens_with(options: OpenOptions, context_size: int) -> int:
    """Return the total capacity of the KV cache: the number in the options, or one context per sequence."""
    return options.kv_tokens if isinstance(options.kv_tokens, int) else context_size * options.max_sequences


def used_devices(options: OpenOptions, devices: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return the devices on which llama.cpp will place layers. Raises UsageError if there are too few devices.

    Without any device, all layers run on the CPU, so there is nothing to check.
    """
    if not devices:
        return devices
    split = split_of(options)
    if split and len(split) != len(devices):
        raise UsageError(
            f"--tensor-split: {counted(len(split), 'number')} for {counted(len(devices), 'device')}: {_names(devices)}",
            hint="give one number for each device, and 0 for a device that should have no layers",
        )
    if options.split_mode != "none":
        return devices
    main_gpu = options.main_gpu or 0
    if main_gpu >= len(devices):
        raise UsageError(
            f"--main-gpu: {main_gpu} is not one of llama.cpp's devices, which are numbered from 0: {_names(devices)}"
        )
    return [devices[main_gpu]]


def split_of(options: OpenOptions) -> tuple[float, ...]:
    """Return the proportion of the layers for each device, or () for proportions of the free memory."""
    return parse_tensor_split(options.tensor_split) if options.tensor_split else ()


class Placement(NamedTuple):
    """Where a model runs.

    context_size    tokens of each sequence
    gpu_layers      number of layers on GPUs, or ALL_LAYERS
    encodes_on_gpu  whether the first GPU has room for the vision encoder, too
    """

    context_size: int
    gpu_layers: int
    encodes_on_gpu: bool = False


def decide_placement(
    options: OpenOptions,
    file: GGUFFile,
    adapters: Sequence[AdapterFile],
    train_context: int,
    devices: Callable[[], Sequence[dict[str, Any]]],
    projector: ProjectorFile | None = None,
) -> Placement:
    """Choose the context size, the number of GPU layers, and whether the vision encoder runs on a GPU.

    devices  returns the usable GPUs; called only if a GPU may be used
    Raises DoesNotFit, and UsageError if the devices do not match the options that divide the model. Raises
    NoRoomOnGpu if the number of layers is "auto" and no layer fits.
    """
    asked = options.gpu_layers
    wanted = asked if isinstance(asked, int) else None if asked == AUTO else ALL_LAYERS
    if wanted == 0:
        return Placement(_context_in_memory(options, file, adapters, train_context, projector), 0)
    found = used_devices(options, devices())
    if not found and wanted is not None:  # without devices, all layers run on the CPU
        return Placement(_context_in_memory(options, file, adapters, train_context, projector), wanted)
    known = all(device["total"] for device in found)  # Drivers that do not know the memory size report 0 bytes.
    free = [device["free"] for device in found] if known else []

    def fitting(context_size: int, free: Sequence[int] | None = None) -> int:
        tokens, rows = tokens_with(options, context_size), rows_at_once(projector)
        sizes = layer_sizes(file, tokens, kv_type_of(options), max_sequences=options.max_sequences, rows=rows)
        return layers_that_fit(sizes, usable if free is None else free, split_of(options))

    beside = free if options.rpc else beside_encoder(free, projector)  # servers do not run the encoder
    # The encoder must not take the place of layers that the user has asked for.
    least = 1 if wanted is None else layers_of(file) + 1 if wanted == ALL_LAYERS else min(wanted, layers_of(file) + 1)
    on_gpu = beside != free and fitting(options.context_size or 0, beside) >= least
    usable = beside if on_gpu else free
    context_size = options.context_size or _context_on_gpus(fitting, train_context, wanted)
    gpu_layers = fitting(context_size) if wanted is None else wanted
    if gpu_layers == 0:
        raise NoRoomOnGpu(_no_room(found))
    on_cpu = 0 if gpu_layers == ALL_LAYERS else layers_of(file) + 1 - gpu_layers
    if on_cpu > 0 or (projector is not None and not on_gpu):
        context_size = _context_in_memory(
            *(options, file, adapters, context_size, projector), layers=on_cpu, encodes_on_gpu=on_gpu
        )
    return Placement(context_size, gpu_layers, on_gpu)


def _context_in_memory(
    options: OpenOptions,
    file: GGUFFile,
    adapters: Sequence[AdapterFile],
    train_context: int,
    projector: ProjectorFile | None,
    *,
    layers: int | None = None,
    encodes_on_gpu: bool = False,
) -> int:
    """Return the context size for a model in main memory. Raises DoesNotFit.

    layers  the number of layers in main memory if the others are on GPUs; `train_context` is then the largest default
    encodes_on_gpu  as in `footprint_on_llama`

    llama.cpp fills its whole cache with zeros when it opens the model. A system that has overcommitted its memory would
    then kill the process, so this function checks the size beforehand.
    """
    kv_type, max_sequences, rows = kv_type_of(options), options.max_sequences, rows_at_once(projector)
    cache = cache_by_context(file, kv_type, max_sequences=max_sequences, layers=layers, rows=rows)
    if isinstance(options.kv_tokens, int):
        n_bytes = cache_bytes(file, options.kv_tokens, kv_type, max_sequences=max_sequences, layers=layers, rows=rows)
        cache = KVBytes(0, ((1, n_bytes),))  # The cache size does not depend on the context size.
    footprint = footprint_on_llama(
        *(file, adapters),
        cache=cache,
        kv_type=kv_type,
        layers=layers,
        projector=projector,
        encodes_on_gpu=encodes_on_gpu,
    )
    # The number of parameters only affects a hint about the whole model, so 0 is passed for a part of the model.
    return context_for(
        options.context_size,
        train_context=train_context,
        largest_default=LARGEST_FILLED_DEFAULT if layers is None else LARGEST_DEFAULT,
        needs=MemoryNeeds(footprint, free_memory(), parameter_count(file) if layers is None else 0),
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
