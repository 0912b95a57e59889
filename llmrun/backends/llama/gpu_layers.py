"""Computes how many layers of a model fit in the free memory of the GPUs.

llama.cpp offloads the output layer first and then the last layers. It divides them among the GPUs in proportion to
their free memory, or as the user says. It does not compute how many layers fit, so this module does that for "auto".
Devices of RPC servers are GPUs here: their server reports the free memory.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.llama.shared_layout import MOST_WANTED
from llmrun.backends.sizing.kv_bytes import KVBytes
from llmrun.backends.sizing.layer_heads import head_sizes
from llmrun.backends.sizing.layer_windows import layer_windows
from llmrun.backends.sizing.layers_kept import layers_of, layers_run, storing_layers
from llmrun.backends.sizing.recurrent_layers import layer_memories, widest_input
from llmrun.formats.layouts.arena import round_up
from llmrun.formats.layouts.kv_types import parse_kv_type
from llmrun.model.archs.parts.encoders import has_no_cache, is_encoder

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile

ALL_LAYERS = -1  # stands for all layers where a number of layers is expected

_MARGIN = 1 << 30  # bytes left free on each GPU for other programs and uncounted buffers; llama.cpp's own margin
_ROWS = 512  # rows that llama.cpp computes in one batch
_CACHE_STEP = 256  # tokens; llama.cpp rounds the cache of a sliding window up to a multiple of this
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


def layer_sizes(file: GGUFFile, cache_tokens: int, kv_type: str = "f16", *, max_sequences: int = 1) -> LayerSizes:
    """Return the GPU memory that llama.cpp will need for a model.

    cache_tokens  capacity of the KV cache for all sequences together
    """
    architecture = file.string("general.architecture")
    run = layers_run(file)
    layers = _layer_caches(file, cache_tokens, kv_type, max_sequences)
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
    rows = max(_ROWS, cache_tokens) if is_encoder(file) else _ROWS
    activations = 4 * rows * (6 * width + 3 * inner + 4 * _of_all_layers(file)) + 4 * MOST_WANTED * vocabulary
    scores = 4 * rows * heads * min(cache_tokens, 8192)  # needed only without flash attention
    return LayerSizes(tuple(layers), output, activations + scores, visiting)


def resident_activations(file: GGUFFile) -> int:
    """Return how many bytes of activations llama.cpp touches in main memory for a long prompt.

    On a GPU, by contrast, the whole reserved buffer counts.
    """
    return _ROWS * row_bytes(file)


def row_bytes(file: GGUFFile) -> int:
    """Return how many bytes of activations llama.cpp touches in main memory for each row of a batch."""
    width, inner = _widths(file)
    of_layers, recurrent = _of_all_layers(file), widest_input(file)
    # Besides four times the width, we measured 3.0 to 3.2 times the input of a delta net, and 2.5 to 3.0 with Mamba.
    of_recurrent = 3 * recurrent + 4 * width if recurrent else 0
    return 4 * max(4 * of_layers, of_layers + 3 * width + 2 * inner, of_recurrent)


def _of_all_layers(file: GGUFFile) -> int:
    """Return the number of per-layer embedding features of a token, summed over all layers (Gemma 3n and 4).

    llama.cpp's compute buffer holds four copies of these features while it computes them. We measured 2.00 MiB more for
    each additional layer of 256 features.
    """
    table = file.tensors.get("per_layer_token_embd.weight")
    return 0 if table is None else table.shape[0]


def is_of_first_layers(name: str, layers: int) -> bool:
    """Return whether a tensor belongs to one of the first `layers` layers."""
    layer = _LAYER.match(name)
    return layer is not None and int(layer[1]) < layers


def cache_bytes(
    file: GGUFFile, cache_tokens: int, kv_type: str = "f16", *, max_sequences: int = 1, layers: int | None = None
) -> int:
    """Return the size in bytes of llama.cpp's KV cache and recurrent states.

    cache_tokens  capacity of the cache for all sequences together
    layers        count only the first `layers` layers, or all if it is None
    """
    return sum(_layer_caches(file, cache_tokens, kv_type, max_sequences)[:layers])


def cache_by_context(
    file: GGUFFile, kv_type: str = "f16", *, max_sequences: int = 1, layers: int | None = None
) -> KVBytes:
    """Return the size of llama.cpp's cache, with recurrent states, as a function of each sequence's context size.

    layers  count only the first `layers` layers, or all if it is None
    """
    windows = layer_windows(file, layers_of(file))
    most = [-(-_window_tokens(window, max_sequences) // max_sequences) if window else 0 for window in windows]
    kv = [max_sequences * n_bytes for n_bytes in _kv_bytes(file, kv_type)]
    return KVBytes.of_layers(
        list(zip(most, kv, strict=True))[:layers],
        states=max_sequences * sum(memory.state_bytes for memory in layer_memories(file)[:layers]),
    )


def _layer_caches(file: GGUFFile, cache_tokens: int, kv_type: str, max_sequences: int) -> list[int]:
    """Return the size in bytes of each layer's part of the KV cache and of its recurrent states."""
    windows = layer_windows(file, layers_of(file))
    tokens = [
        min(cache_tokens, _window_tokens(window, max_sequences)) if window else cache_tokens for window in windows
    ]
    kv, states = _kv_bytes(file, kv_type), [max_sequences * memory.state_bytes for memory in layer_memories(file)]
    return [size * n + state for size, n, state in zip(kv, tokens, states, strict=True)]


def _window_tokens(window: int, max_sequences: int) -> int:
    """Return the cache capacity of a sliding-window layer: one window per sequence, plus the rows of one batch."""
    return round_up(window * max_sequences + _ROWS, _CACHE_STEP)


def layers_that_fit(sizes: LayerSizes, free: Sequence[int], split: Sequence[float] = ()) -> int:
    """Return the largest value of llama.cpp's `n_gpu_layers` that fits. The output layer counts as one layer.

    free   free bytes on each GPU, including the safety margin that must stay free
    split  the proportion of the layers for each GPU; by default, that of its free memory
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
    """Return the bytes needed on each GPU if `n_layers` are offloaded and divided the way llama.cpp does.

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

    It is 0 if a layer reuses another layer's cache, for recurrent layers without attention, and for most encoders.
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

    llama.cpp rejects a file whose metadata claims more features. Without the upper bound, we would report such a file
    as too large before llama.cpp could report the real problem.
    """
    most = [0] * n_layers
    for name, tensor in file.tensors.items():
        layer = _LAYER.match(name)
        if layer is not None and int(layer[1]) < n_layers:
            most[int(layer[1])] = max(most[int(layer[1])], tensor.n_rows)
    return most


def _per_layer(file: GGUFFile, key: str, n_layers: int, default: int) -> list[int]:
    """Read a number for each layer. The file may have one value for all layers, or an array."""
    value = file.metadata.get(key, default)
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and len(value) >= n_layers:
        return [int(number) for number in value[:n_layers]]
    return [value if isinstance(value, int) else default] * n_layers


def _widths(file: GGUFFile) -> tuple[int, int]:
    """Return the widths of the activations between layers and inside a layer.

    Neither can be larger than the largest dimension of a tensor, whatever the metadata says.
    """
    architecture = file.string("general.architecture")
    widest = max((max(tensor.shape) for tensor in file.tensors.values()), default=0)
    width = file.integer(f"{architecture}.embedding_length", 4096)
    inner = _largest(file, f"{architecture}.feed_forward_length", 4 * width)
    return min(width, widest), min(inner, widest)


def _largest(file: GGUFFile, key: str, default: int) -> int:
    return max(_per_layer(file, key, 1, default))
