"""Estimating the memory that a model needs from its header alone, without loading or downloading the weights.

The total is the peak of all processes together, as the operating system counts it. The weights in memory, the KV cache
and the activations are computed from the header. The sizes of the programs and vocabularies were measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llmrun.backends.sizing.kv_bytes import KVBytes
    from llmrun.gguf.reader import GGUFFile

# These come from the peak memory of `llmrun generate` with three tiny models: one with almost no vocabulary, and two
# with vocabularies of 30,256 and 100,356 tokens. The CPU engine took 97.3, 108.4 and 137.6 MB, of which 0.1, 3.3 and
# 11.2 MB were weights and header. With llama.cpp, llmrun took 95.4, 103.9 and 127.4 MB, and the child process took
# 28.2, 38.6 and 70.7 MB.
ENGINE_PROCESS: Final = 97_000_000  # Python, NumPy, llvmlite, kernels
CLIENT_PROCESS: Final = 95_000_000  # the same without llvmlite
LLAMA_PROCESS: Final = 28_000_000
_TOKEN = 290  # bytes per token of the vocabulary, for the tokenizer and its source data, in each process


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory that the parts of a model need, in bytes.

    weights     size of all matrices in memory
    mapped      the part of `weights` in pages of the mapped file, which the system can reclaim
    cache       size of the KV cache as a function of the context size
    scratch     size of activations and temporarily unpacked weights in a step of full size
    vocabulary  size of the tokenizer's data
    header      size of the header, which is freed when the model is open and before scratch and cache are used
    programs    size of all processes before they open a model
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
        """The memory that must be free to open the model in a running program, without the KV cache."""
        return self.weights - self.mapped + self.scratch + self.vocabulary


def vocabulary_bytes(file: GGUFFile) -> int:
    """Return the bytes that one process needs for the vocabulary of a model."""
    return _TOKEN * len(file.strings("tokenizer.ggml.tokens")) if file.has("tokenizer.ggml.tokens") else 0


def header_bytes(file: GGUFFile) -> int:
    return min((tensor.offset for tensor in file.tensors.values()), default=0)
