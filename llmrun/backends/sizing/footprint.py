"""The memory that a model takes, by its header alone: nothing is loaded, or downloaded where the file is elsewhere.

The sum is the peak of all processes together, as the system counts it. What the file decides is counted: weights as
they will lie in memory, the KV cache, activations. What programs and vocabularies take was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llmrun.backends.sizing.kv_bytes import KVBytes
    from llmrun.gguf.reader import GGUFFile

# Peak memory of `llmrun generate` with a model of next to nothing, and the same with 30,256 and 100,356 tokens: 97.3,
# 108.4 and 137.6 MB on the CPU engine, of which 0.1, 3.3 and 11.2 are weights and header; with llama.cpp 95.4, 103.9
# and 127.4, and its own process 28.2, 38.6 and 70.7.
ENGINE_PROCESS: Final = 97_000_000  # Python, NumPy, llvmlite, kernels
CLIENT_PROCESS: Final = 95_000_000  # the same without llvmlite
LLAMA_PROCESS: Final = 28_000_000
_TOKEN = 290  # what a tokenizer is made of and from, in either process


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes.

    weights     of all matrices, as they lie in memory
    mapped      of them, pages of the file: the system takes them back when memory is wanted
    cache       of the KV cache, by the tokens of context in every sequence
    scratch     activations, and what is unpacked for a moment, in a step of full size
    vocabulary  what tokenizing takes
    header      in memory until the model is open; what is scratch or cache later takes its place
    programs    all processes, before they have a model
    """

    weights: int
    cache: KVBytes
    scratch: int = 0
    vocabulary: int = 0
    header: int = 0
    programs: int = 0
    mapped: int = 0

    def total(self, context: int) -> int:
        """The peak with so many tokens in every sequence."""
        return self.programs + self.weights + self.vocabulary + max(self.header, self.scratch + self.cache.of(context))

    @property
    def pinned(self) -> int:
        """What must be free for the model, the KV cache aside, when the program runs already."""
        return self.weights - self.mapped + self.scratch + self.vocabulary


def vocabulary_bytes(file: GGUFFile) -> int:
    """What one process takes to know the tokens of a model."""
    return _TOKEN * len(file.strings("tokenizer.ggml.tokens")) if file.has("tokenizer.ggml.tokens") else 0


def header_bytes(file: GGUFFile) -> int:
    return min((tensor.offset for tensor in file.tensors.values()), default=0)
