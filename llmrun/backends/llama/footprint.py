"""Computes how much main memory llama.cpp and the llmrun process together need to run a model."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.backends.llama.gpu_layers import is_of_first_layers, resident_activations, row_bytes
from llmrun.backends.sizing.footprint import CLIENT_PROCESS, LLAMA_PROCESS, Footprint, header_bytes, vocabulary_bytes
from llmrun.model.archs.parts.encoders import is_encoder

if TYPE_CHECKING:
    from llmrun.backends.sizing.kv_bytes import KVBytes
    from llmrun.formats.gguf.adapter import AdapterFile
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.formats.gguf.tensors import TensorInfo


def footprint_on_llama(
    file: GGUFFile, adapters: Iterable[AdapterFile] = (), *, cache: KVBytes, layers: int | None = None
) -> Footprint:
    """Return the footprint of a model with LoRA adapters on llama.cpp.

    llama.cpp maps the file. For matrices of some types it also makes a copy in the layout that its kernels need. It
    reads the matrices of adapters into memory of their own.

    cache   bytes of the KV cache as a function of the context size
    layers  the number of layers that stay in main memory while the others are on GPUs, or None without a GPU
    """
    scratch = resident_activations(file)
    if is_encoder(file):
        # The batch has as many rows as the context. llama.cpp also reserves and clears logits, which it never computes.
        vocabulary = len(file.strings("tokenizer.ggml.tokens"))
        scratch, cache = 0, replace(cache, token=cache.token + row_bytes(file) + 4 * vocabulary)
    tensors, mapped = list(file.tensors.values()), file.file_bytes
    if layers is not None:  # the output matrix is on a GPU, and only a few rows of the embeddings are ever read
        tensors = [tensor for tensor in tensors if is_of_first_layers(tensor.name, layers)]
        mapped = sum(tensor.nbytes for tensor in tensors)
    repacked = sum(tensor.nbytes for tensor in tensors if _is_repacked(tensor, file))
    return Footprint(
        weights=mapped + repacked + sum(adapter.nbytes for adapter in adapters),
        mapped=mapped,
        cache=cache,
        scratch=scratch,
        vocabulary=2 * vocabulary_bytes(file),
        header=header_bytes(file),
        programs=CLIENT_PROCESS + LLAMA_PROCESS,
    )


# repack.cpp in ggml repacks matrices into groups of 8 rows.
_ROWS_AT_ONCE = 8
_TIED = "token_embd.weight"


def _is_repacked(tensor: TensorInfo, file: GGUFFile) -> bool:
    """Return whether llama.cpp makes a repacked copy of a matrix in addition to the mapped file (repack.cpp)."""
    is_matrix = len(tensor.shape) > 1 and tensor.shape[1] % _ROWS_AT_ONCE == 0
    is_multiplied = tensor.name != _TIED or "output.weight" not in file.tensors
    return is_matrix and is_multiplied and tensor.type.name in _repacked_types()


def _repacked_types() -> frozenset[str]:
    if platform.machine() in ("aarch64", "arm64"):
        return frozenset({"Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4"})
    types = frozenset({"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"})  # These need AVX2, which we assume is present.
    return types | {"Q2_K"} if "avx512f" in processor_flags() else types


def processor_flags() -> frozenset[str]:
    """Return the CPU feature flags that Linux reports, or an empty set on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split() for line in lines if line.startswith("flags")), []))
