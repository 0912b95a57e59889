"""Estimates the memory that a model needs from its header alone, without loading or downloading the weights.

The total is the combined peak memory of all processes, as the operating system counts it. The sizes of the weights, the
KV cache and the activations are computed from the header. The sizes of the programs and vocabularies were measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llmrun.backends.sizing.kv_bytes import KVBytes
    from llmrun.formats.gguf.reader import GGUFFile

# These sizes come from the peak memory of `llmrun generate` with a tiny model that has almost no vocabulary: 107.3 MB
# with the CPU engine and 131.6 MB with llama.cpp, of which 1 MB was the model. _TOKEN was measured with vocabularies of
# 30,256 and 100,356 tokens. With one of 49,152, the sums are 0.5 % too high for the CPU engine and 0.5 % too low for
# llama.cpp.
ENGINE_PROCESS: Final = 106_000_000  # Python, NumPy, llvmlite, kernels
CLIENT_PROCESS: Final = 102_000_000  # Python, NumPy and the rest of llmrun, without llvmlite and kernels
LLAMA_PROCESS: Final = 28_000_000
_TOKEN = 290  # bytes per token of the vocabulary, for the tokenizer and its source data, in each process


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory that each part of a model needs, in bytes.

    weights     size of all matrices in memory
    mapped      the part of `weights` in pages of the mapped file, which the system can reclaim
    cache       size of the KV cache as a function of the context size
    scratch     size of activations, logits and temporarily unpacked weights in a step of maximum size
    vocabulary  size of the tokenizer's data
    header      size of the header, which is freed after the model is opened, before scratch and cache are used
    programs    size of all processes before they open the model
    """

    weights: int
    cache: KVBytes
    scratch: int = 0
    vocabulary: int = 0
    header: int = 0
    programs: int = 0
    mapped: int = 0

    def total(self, context: int) -> int:
        """Return the peak memory with `context` tokens in every sequence."""
        return self.programs + self.weights + self.vocabulary + max(self.header, self.scratch + self.cache.of(context))

    @property
    def pinned(self) -> int:
        """The memory in bytes that must be free to open the model in a running program, excluding the KV cache."""
        return self.weights - self.mapped + self.scratch + self.vocabulary


def vocabulary_bytes(file: GGUFFile) -> int:
    """Return how many bytes one process needs for a model's vocabulary."""
    return _TOKEN * len(file.strings("tokenizer.ggml.tokens")) if file.has("tokenizer.ggml.tokens") else 0


def header_bytes(file: GGUFFile) -> int:
    return min((tensor.offset for tensor in file.tensors.values()), default=0)
