"""How many layers of a model fit into the memory that its GPUs have free.

llama.cpp offloads the output layer first, then the last layers, and gives each GPU a share of them in proportion to
its free memory. What it does not do, and nobody who asks for "auto" wants to do by hand, is to count.
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
from llmrun.layouts.arena import round_up

if TYPE_CHECKING:
    from llmrun.gguf.reader import GGUFFile

ALL_LAYERS = -1  # in place of a number of layers

_MARGIN = 1 << 30  # bytes of a GPU left to others, and to what is not counted here: llama.cpp's own margin
_ROWS = 512  # llama.cpp computes as many at once
_CACHE_STEP = 256  # tokens; a window's cache is a multiple of it
_KV_BYTES = {"f16": 2, "q8_0": 34 / 32}  # of a number; a block of 32 has a scale
_EMBEDDINGS = "token_embd.weight"
_LOOKED_UP = frozenset({"per_layer_token_embd.weight", "position_embd.weight", "token_types.weight"})
_WITH_THE_FIRST_LAYER = frozenset({"per_layer_model_proj.weight", "per_layer_proj_norm.weight"})
_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Bytes on a GPU.

    layers     of each layer, with its share of the KV cache
    output     of the output layer
    computing  what computing needs on every GPU that has a layer
    visiting   the largest matrix: those of the layers that stay with the CPU are copied to a GPU, one at a time, for
               each batch of a long prompt
    """

    layers: tuple[int, ...]
    output: int
    computing: int
    visiting: int


def layer_sizes(file: GGUFFile, cache_tokens: int, kv_type: str = "f16", *, max_sequences: int = 1) -> LayerSizes:
    """What llama.cpp will take for a model with a cache of so many tokens, all sequences together."""
    architecture = file.string("general.architecture")
    n_layers, run = layers_of(file), layers_run(file)
    layers = [
        kv * (min(cache_tokens, _window_tokens(window, max_sequences)) if window else cache_tokens)
        for kv, window in zip(_kv_bytes(file, kv_type), layer_windows(file, n_layers), strict=True)
    ]
    # Tables that tokens are looked up in stay with the CPU; where one is the output matrix too, it is copied.
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
    activations = 4 * _ROWS * (6 * width + 3 * inner + 4 * _of_all_layers(file)) + 4 * MOST_WANTED * vocabulary
    scores = 4 * _ROWS * heads * min(cache_tokens, 8192)  # of plain attention; with flash attention there are none
    return LayerSizes(tuple(layers), output, activations + scores, visiting)


def resident_activations(file: GGUFFile) -> int:
    """Bytes of activations that llama.cpp touches in memory for a long prompt. On a GPU all that it reserves counts."""
    width, inner = _widths(file)
    of_layers = _of_all_layers(file)
    return 4 * _ROWS * max(4 * of_layers, of_layers + 3 * width + 2 * inner)


def _of_all_layers(file: GGUFFile) -> int:
    """Features of what all layers together are given of a token (Gemma 3n and 4). While it is made, there are four of
    it: llama.cpp's buffer grew by 2.00 MiB with each layer of 256."""
    table = file.tensors.get("per_layer_token_embd.weight")
    return 0 if table is None else table.shape[0]


def cache_bytes(file: GGUFFile, cache_tokens: int, kv_type: str = "f16", *, max_sequences: int = 1) -> int:
    """Bytes of the KV cache that llama.cpp makes for so many tokens, all sequences together."""
    sizes = layer_sizes(file, cache_tokens, kv_type, max_sequences=max_sequences)
    return sum(sizes.layers) - sum(layer_sizes(file, 0).layers)


def cache_by_context(file: GGUFFile, kv_type: str = "f16", *, max_sequences: int = 1) -> KVBytes:
    """The same, by the tokens of context in every sequence."""
    windows = layer_windows(file, layers_of(file))
    most = [-(-_window_tokens(window, max_sequences) // max_sequences) if window else 0 for window in windows]
    return KVBytes.of_layers(zip(most, [max_sequences * kv for kv in _kv_bytes(file, kv_type)], strict=True))


def _window_tokens(window: int, max_sequences: int) -> int:
    """That llama.cpp keeps for layers of a window: of all sequences what they see, and the rows it runs at once."""
    return round_up(window * max_sequences + _ROWS, _CACHE_STEP)


def layers_that_fit(sizes: LayerSizes, free: Sequence[int]) -> int:
    """The largest number for llama.cpp's `n_gpu_layers` (the output layer counts as one) with which no GPU needs more
    than it has free, in bytes, a margin left."""
    usable = [max(0, n - _MARGIN) for n in free]
    if not any(usable):
        return 0
    for n_layers in range(len(sizes.layers) + 1, 0, -1):
        needed = bytes_needed(sizes, free, n_layers)
        if all(need <= room for need, room in zip(needed, usable, strict=True)):
            return n_layers
    return 0


def bytes_needed(sizes: LayerSizes, free: Sequence[int], n_layers: int) -> list[int]:
    """Bytes on each GPU when `n_layers` are offloaded, shared out as llama.cpp does."""
    needed = [0] * len(free)
    total = sum(free)
    bounds = [part / total for part in accumulate(free)]
    everything = [*sizes.layers, sizes.output]
    for index, size in enumerate(everything[len(everything) - n_layers :]):
        gpu = min(bisect_right(bounds, index / n_layers), len(free) - 1)
        needed[gpu] += size
    besides = sizes.computing + (sizes.visiting if n_layers < len(everything) else 0)
    return [need + besides if need else 0 for need in needed]


def _kv_bytes(file: GGUFFile, kv_type: str) -> list[int]:
    """Bytes of a token in the KV cache of each layer; 0 of those that look at what others keep."""
    architecture, n_layers = file.string("general.architecture"), layers_of(file)
    heads = _per_layer(file, f"{architecture}.attention.head_count", n_layers, 32)
    kv_heads = _per_layer(file, f"{architecture}.attention.head_count_kv", n_layers, max(heads))
    size = file.integer(f"{architecture}.embedding_length", 4096) // max(1, *heads)
    sizes = head_sizes(file, layer_windows(file, n_layers), size)
    most = _most_rows(file, n_layers)
    numbers = [min(count * sum(of), 2 * rows) for count, of, rows in zip(kv_heads, sizes, most, strict=True)]
    storing = storing_layers(file)
    return [int(_KV_BYTES[kv_type] * count) if layer < storing else 0 for layer, count in enumerate(numbers)]


def _most_rows(file: GGUFFile, n_layers: int) -> list[int]:
    """Rows of each layer's largest matrix. Neither keys nor values have more features than that: a file whose metadata
    claim more is refused by llama.cpp, and not to be called too large before."""
    most = [0] * n_layers
    for name, tensor in file.tensors.items():
        layer = _LAYER.match(name)
        if layer is not None and int(layer[1]) < n_layers:
            most[int(layer[1])] = max(most[int(layer[1])], tensor.n_rows)
    return most


def _per_layer(file: GGUFFile, key: str, n_layers: int, default: int) -> list[int]:
    """A number that a file gives once or for each layer."""
    value = file.metadata.get(key, default)
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and len(value) >= n_layers:
        return [int(number) for number in value[:n_layers]]
    return [value if isinstance(value, int) else default] * n_layers


def _widths(file: GGUFFile) -> tuple[int, int]:
    """Of the activations between layers, and inside: no wider than a matrix that they could be multiplied by."""
    architecture = file.string("general.architecture")
    widest = max((max(tensor.shape) for tensor in file.tensors.values()), default=0)
    width = file.integer(f"{architecture}.embedding_length", 4096)
    inner = _largest(file, f"{architecture}.feed_forward_length", 4 * width)
    return min(width, widest), min(inner, widest)


def _largest(file: GGUFFile, key: str, default: int) -> int:
    return max(_per_layer(file, key, 1, default))
