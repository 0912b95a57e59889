"""Estimates the memory that a model needs from its header alone, and chooses its context size.

Weights are neither loaded nor downloaded. The total is the combined peak memory of all processes, as counted by the
operating system. The sizes of the weights, the KV cache and the activations are computed from the header. The sizes of
the programs and vocabularies were measured.

Head sizes, sliding windows and recurrent layers are read from the header because llama.cpp also runs architectures that
our own engine does not support. Recurrent layers are recognized by their tensors, because each architecture describes
recurrent layers with different metadata. llama.cpp stores recurrent states as float32.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, Self, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from llmrun.base.amounts import format_mebibytes
from llmrun.base.errors import DoesNotFit, shown
from llmrun.formats.layouts.kv import F16, Q4_0, Q8_0, parse_kv_type
from llmrun.model.archs.parts.architecture import Windows, architecture_named

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.vision.layout import Projector

Number = TypeVar("Number", int, float)


class KVBytes(Struct, frozen=True):
    """The size in bytes of keys and values, as a function of the number of tokens.

    token    bytes per token in all layers that have no sliding window
    windows  (limit, bytes per token) pairs for the other layers, which keep at most `limit` tokens
    states   bytes that do not depend on the number of tokens, such as recurrent states
    """

    token: int
    windows: tuple[tuple[int, int], ...] = ()
    states: int = 0

    @classmethod
    def of_layers(cls, layers: Iterable[tuple[int, int]], states: int = 0) -> Self:
        """Sum the sizes of layers, given as (window in tokens, bytes per token). A window of 0 means no limit."""
        sums = Counter[int]()
        for tokens, n_bytes in layers:
            sums[tokens] += n_bytes
        return cls(sums.pop(0, 0), tuple(sorted(sums.items())), states)

    def of(self, tokens: Number) -> Number:
        """Return the size in bytes for a number of tokens, which may be a fractional average."""
        windows = sum(min(tokens, most) * n_bytes for most, n_bytes in self.windows)
        return tokens * self.token + windows + self.states


def head_sizes(file: GGUFFile, windows: Sequence[int], default: int) -> list[tuple[int, int]]:
    """Return the key and value sizes of one head in each layer, in features, as llama.cpp caches them.

    Sliding-window layers may have sizes that differ from the sizes of other layers. If the file does not specify a
    size, the result is `default`. With latent attention (MLA), values are part of the cached keys, so their size is 0.
    """
    attention = f"{file.string('general.architecture')}.attention"
    if file.integer(f"{attention}.value_length_mla", 0):
        return [(file.integer(f"{attention}.key_length", default, minimum=0), 0)] * len(windows)
    plain = _sizes(file, attention, "", (default, default))
    of_window = _sizes(file, attention, "_swa", plain)
    return [of_window if window else plain for window in windows]


def _sizes(file: GGUFFile, attention: str, kind: str, default: tuple[int, int]) -> tuple[int, int]:
    key = file.integer(f"{attention}.key_length{kind}", default[0], minimum=0)
    return key, file.integer(f"{attention}.value_length{kind}", default[1], minimum=0)


# Architectures that only llama.cpp runs, from its src/models.
_WINDOWS_ELSEWHERE = {"afmoe": Windows(every=4), "mellum": Windows(every=4), "plamo3": Windows(every=8)}


def layer_windows(file: GGUFFile, n_layers: int) -> list[int]:
    """Return each layer's window in tokens, including the current token, or 0 if none is known.

    Raises BadGGUF if the window in the metadata is not a valid number.
    """
    architecture = file.string("general.architecture")
    declared = architecture_named(architecture)
    rule = _WINDOWS_ELSEWHERE.get(architecture) if declared is None else declared.windows
    key = f"{architecture}.attention.sliding_window"
    if rule is None:
        if f"{key}_pattern" not in file.metadata:
            return [0] * n_layers
        rule = Windows()
    if rule.unused or rule.only_with not in (0, n_layers):
        return [0] * n_layers
    window, pattern = file.integer(key, rule.default, minimum=0), file.metadata.get(f"{key}_pattern")
    if isinstance(pattern, np.ndarray):
        return [window if seen else 0 for seen in np.resize(pattern, n_layers).tolist()]
    period = file.integer(f"{key}_pattern", rule.every, minimum=0)
    without = 0 if rule.first else period - 1
    return [window if period == 0 or layer % period != without else 0 for layer in range(n_layers)]


def layers_of(file: GGUFFile) -> int:
    return file.integer(f"{file.string('general.architecture')}.block_count", minimum=1, maximum=1 << 16)


def layers_run(file: GGUFFile) -> int:
    """Return the number of layers that llama.cpp runs.

    llama.cpp does not load the layers for multi-token prediction at the end, so these layers have no cache.
    """
    ahead = file.integer(f"{file.string('general.architecture')}.nextn_predict_layers", 0, minimum=0)
    return max(0, layers_of(file) - ahead) or layers_of(file)  # all layers, if the file has only MTP layers


def storing_layers(file: GGUFFile) -> int:
    """Return how many layers store keys and values, excluding layers that reuse a cache or are not run."""
    architecture, run = file.string("general.architecture"), layers_run(file)
    if architecture == "gemma3n":  # Gemma 3n files do not contain this number
        from llmrun.model.archs.gemma3n import STORING

        return min(run, STORING)
    if architecture != "gemma4":
        return run
    return run - file.integer(f"{architecture}.attention.shared_kv_layers", 0, minimum=0, maximum=run)


_FLOAT = 4
_CONVOLUTION = re.compile(r"blk\.(\d+)\.(?:ssm_conv1d|shortconv\.conv)\.weight$")
_MATRICES = re.compile(r"(blk\.\d+)\.ssm_conv1d\.weight$")


class LayerMemory(Struct, frozen=True):
    """The data that a layer stores for one sequence.

    attends      whether the layer has keys and values
    convolution  bytes of the causal convolution's inputs that later tokens need
    matrices     bytes of the heads' matrices, which each token reads and writes
    """

    attends: bool = True
    convolution: int = 0
    matrices: int = 0

    @property
    def state_bytes(self) -> int:
        """The size of the state of one sequence."""
        return self.convolution + self.matrices


def layer_memories(file: GGUFFile) -> list[LayerMemory]:
    """Return the memory that each layer needs. Raises BadGGUF if a size in the metadata is not a valid number."""
    memories, run = [LayerMemory()] * layers_of(file), layers_run(file)
    ssm = f"{file.string('general.architecture')}.ssm"
    rows, columns = (file.integer(f"{ssm}.{key}", 0, minimum=0) for key in ("state_size", "inner_size"))
    for name, tensor in file.tensors.items():
        found = _CONVOLUTION.match(name)
        if found is None or int(found[1]) >= run:
            continue
        # The convolution has more features than `rows` or `columns`. llama.cpp rejects files with other metadata.
        features = tensor.n_rows
        memories[int(found[1])] = LayerMemory(
            attends=f"blk.{found[1]}.attn_output.weight" in file.tensors,  # Falcon-H1's layers also use attention
            convolution=_FLOAT * (tensor.shape[0] - 1) * features,
            matrices=_FLOAT * min(rows, features) * min(columns, features),
        )
    return memories


def widest_input(file: GGUFFile) -> int:
    """Return the maximum number of convolution features in a layer with matrices, or 0 if there are no such layers."""
    blocks = [found[1] for found in map(_MATRICES.match, file.tensors) if found]
    names = [f"{block}.{name}.weight" for block in blocks for name in ("attn_qkv", "ssm_in")]
    return max((file.tensors[name].n_rows for name in names if name in file.tensors), default=0)


# These sizes come from the peak memory of `llmrun generate` with a tiny model that has almost no vocabulary: 107.3 MB
# with the CPU engine and 131.6 MB with llama.cpp, including 1 MB for the model. _TOKEN was measured with vocabularies
# of 30,256 and 100,356 tokens. With a vocabulary of 49,152 tokens, the sums are 0.5 % too high for the CPU engine and
# 0.5 % too low for llama.cpp. Installed wheels do not load llvmlite and need 48 MB less.
ENGINE_PROCESS: Final = 106_000_000  # Python, NumPy, llvmlite, kernels
CLIENT_PROCESS: Final = 102_000_000  # Python, NumPy and the rest of llmrun, without llvmlite and kernels
LLAMA_PROCESS: Final = 28_000_000
_TOKEN = 290  # bytes per token of the vocabulary, for the tokenizer and its source data, in each process
# Bytes per token of the context outside the cache, for lists of tokens and the index of earlier occurrences (lookup).
# Measured with 131,050 tokens in caches of 4.7 to 67 MB: 88 to 97 bytes.
_TEXT_TOKEN = 92


class Footprint(Struct, frozen=True):
    """The memory that each part of a model needs, in bytes.

    weights     size of all matrices in memory
    mapped      the part of `weights` in pages of the mapped file, which the system can reclaim
    cache       size of the KV cache as a function of the context size
    scratch     size of activations, logits and temporarily unpacked weights in a step of maximum size
    vocabulary  size of the tokenizer's data
    header      size of the header, which is freed after the model is opened, before scratch and cache are used
    programs    size of all processes before they open the model
    kv_type     the type of the KV cache, which determines `cache`
    """

    weights: int
    cache: KVBytes
    scratch: int = 0
    vocabulary: int = 0
    header: int = 0
    programs: int = 0
    mapped: int = 0
    kv_type: str = F16.name

    def total(self, context: int) -> int:
        """Return the peak memory with `context` tokens in every sequence."""
        used = self.scratch + self.cache.of(context) + _TEXT_TOKEN * context
        return self.programs + self.weights + self.vocabulary + max(self.header, used)

    @property
    def pinned(self) -> int:
        """The number of bytes that must be free to open the model in a running program, excluding the KV cache."""
        return self.weights - self.mapped + self.scratch + self.vocabulary


def vocabulary_bytes(file: GGUFFile) -> int:
    """Return how many bytes one process needs for a model's vocabulary."""
    return _TOKEN * len(file.strings("tokenizer.ggml.tokens")) if file.has("tokenizer.ggml.tokens") else 0


def header_bytes(file: GGUFFile) -> int:
    return min((tensor.offset for tensor in file.tensors.values()), default=0)


# GPU memory of the encoder's process besides the encoder, mostly for its CUDA context, which takes 120 to 550 MB
# depending on the GPU (ggml-org/llama.cpp#20595).
GPU_CONTEXT: Final = 550_000_000


def rows_in_one_step(projector: Projector | None) -> int:
    """Return the number of rows that must fit in one step because the rows of an image may attend to each other."""
    return 0 if projector is None or projector.is_causal else projector.most_rows


def with_encoder(
    footprint: Footprint, projector: Projector | None, file: GGUFFile, *, on_gpu: bool = False
) -> Footprint:
    """Add the encoder's process to the footprint of a model.

    The process contains the text model's vocabulary. libmtmd reads the weights, and keeps its buffers.

    on_gpu  whether the weights and the buffers are on a GPU
    """
    if projector is None:
        return footprint
    weights = 0 if on_gpu else projector.weight_bytes
    return replace(
        footprint,
        weights=footprint.weights + weights,
        scratch=footprint.scratch + (0 if on_gpu else projector.memory_bytes - weights),
        vocabulary=footprint.vocabulary + vocabulary_bytes(file),
        programs=footprint.programs + LLAMA_PROCESS,
    )


def encoder_gpu_bytes(projector: Projector) -> int:
    """Return the GPU memory that an encoder on a GPU needs."""
    return projector.memory_bytes + GPU_CONTEXT


# The largest default context. Many models support 131,072 tokens or more, but chats rarely need more than this default.
# Unused parts of the cache cost nothing, because the system allocates pages on first use.
LARGEST_DEFAULT: Final = 32_768
# The largest default context for caches that are filled with zeros when the model is opened, so that all of their
# memory is in use.
LARGEST_FILLED_DEFAULT: Final = 8_192

# Smaller contexts are useless, so a default of up to this many tokens may use all free memory.
_LEAST_DEFAULT = 512
_LEAST_BITS = 1.6  # bits per weight of the smallest existing quantization
_STEP = 32  # tokens per block of the paged cache


class MemoryNeeds(Struct, frozen=True):
    """The memory that a model needs, and the memory that is free.

    footprint   the memory that the model needs
    free        free memory in bytes, or None if the system does not report it
    parameters  number of parameters in the model, or 0 if unknown
    """

    footprint: Footprint
    free: int | None
    parameters: int = 0

    def fits(self, context: int) -> bool:
        return self.free is None or self.footprint.pinned + self.footprint.cache.of(context) <= self.free

    @property
    def most(self) -> int:
        """The largest context that fits, in whole blocks."""
        return self._context_in(self._room)

    @property
    def comfortable(self) -> int:
        """The context, in whole blocks, whose cache takes half of the memory that the model leaves free."""
        return self._context_in((self._room - self.footprint.mapped) // 2)

    @property
    def most_weights(self) -> int:
        """The size in bytes of the largest weights that would fit together with the smallest useful context."""
        room = self._room + self.footprint.weights - self.footprint.mapped - self.footprint.cache.of(_LEAST_DEFAULT)
        return max(0, room)

    @property
    def most_bits(self) -> float:
        """The largest number of bits per parameter that would fit together with the smallest useful context."""
        return 8 * self.most_weights / self.parameters

    @property
    def _room(self) -> int:
        """The number of free bytes for the cache, which is negative if the model alone does not fit."""
        assert self.free is not None
        return self.free - self.footprint.pinned

    def _context_in(self, room: int) -> int:
        """Return the largest context, in whole blocks, whose cache fits in `room` bytes.

        If all layers have sliding windows, the cache stops growing and the result is limited to `room` tokens.
        """
        cache = self.footprint.cache
        sizes = range(_STEP, room // max(1, cache.token) + 1, _STEP)
        return _STEP * bisect_right(sizes, room, key=cache.of)


def context_for(asked: int | None, *, train_context: int, largest_default: int, needs: MemoryNeeds, path: str) -> int:
    """Return the context size to use, in tokens. Raises DoesNotFit if there is not enough memory.

    The result is `asked` unless `asked` is None. The default is the trained context, limited to `largest_default` and
    to half of the memory that the weights leave free. The memory limit does not reduce the default below 512 tokens.
    """
    if asked is not None:
        context = asked
    else:
        context = min(train_context, largest_default)
        if needs.free is not None and needs.comfortable < context:
            context = min(context, max(needs.comfortable, _LEAST_DEFAULT))
    check_cache_fits(context, needs, path, flag="--ctx-size")
    return context


def check_cache_fits(tokens: int, needs: MemoryNeeds, path: str, *, flag: str) -> None:
    """Raise DoesNotFit if a cache of this many tokens does not fit in the free memory. `flag` sets the cache size."""
    if not needs.fits(tokens):
        raise _does_not_fit(tokens, needs, path, flag)


def shared_cache_tokens(context_size: int, max_sequences: int, needs: MemoryNeeds) -> int:
    """Return the size of a cache that several sequences share, in tokens (`OpenOptions.kv_tokens`).

    The cache holds a full context for every sequence if that takes at most half of the memory that the model leaves
    free. Otherwise, the cache takes half of the free memory, but always holds at least one context. `needs` describes
    the memory for `max_sequences` sequences.
    """
    each = context_size if needs.free is None else min(context_size, needs.comfortable)
    return max(context_size, max_sequences * each)


def _does_not_fit(context: int, needs: MemoryNeeds, path: str, flag: str) -> DoesNotFit:
    assert needs.free is not None
    needed = needs.footprint
    cache = needed.cache.of(context)
    buffers = needed.scratch + needed.vocabulary
    parts = [
        *([f"weights ({format_mebibytes(needed.weights - needed.mapped)})"] if needed.weights > needed.mapped else []),
        *([f"buffers ({format_mebibytes(buffers)})"] if buffers else []),
        f"a KV cache of {context:,} tokens",
    ]
    verb = "needs" if len(parts) == 1 else f"({format_mebibytes(cache)}) need"
    words = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    sentence = f"not enough memory for {shown(path, 300)}: {words} {verb} {format_mebibytes(needed.pinned + cache)}"
    sentence = f"{sentence}, but only {format_mebibytes(needs.free)} is free"
    if needs.most == 0:
        return DoesNotFit(sentence, hint=_quantization_hint(needs), most_weights=needs.most_weights)
    return DoesNotFit(sentence, hint=f"try {flag} {needs.most}, the largest that fits{_smaller_type(needed.kv_type)}")


def _smaller_type(kv_type: str) -> str:
    """Return the end of a hint that recommends a smaller type of KV cache, or an empty string."""
    types = parse_kv_type(kv_type)
    if F16 in types:
        return f", or --kv-type {Q8_0.name}, which halves the KV cache"
    if Q8_0 in types:
        return f", or --kv-type {Q4_0.name}, which halves the KV cache but is less accurate"
    return ""


def _quantization_hint(needs: MemoryNeeds) -> str:
    if needs.parameters and needs.most_bits >= _LEAST_BITS:
        bits = 8 * needs.footprint.weights / needs.parameters
        return f"try a quantization with at most {needs.most_bits:.1f} bits per weight (this one has {bits:.1f})"
    return "try a smaller model, or close other programs"
