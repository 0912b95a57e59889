"""The memory that llama.cpp takes for a model without a GPU, with the process that talks to it."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.backends.llama.gpu_layers import resident_activations
from llmrun.backends.sizing.footprint import CLIENT_PROCESS, LLAMA_PROCESS, Footprint, header_bytes, vocabulary_bytes

if TYPE_CHECKING:
    from llmrun.backends.sizing.kv_bytes import KVBytes
    from llmrun.gguf.reader import GGUFFile
    from llmrun.gguf.tensors import TensorInfo


def footprint_on_llama(file: GGUFFile, *, cache: KVBytes) -> Footprint:
    """The file is mapped; of matrices of some types there is a copy beside it, in the order its kernels take them.
    `cache`: of the KV cache, by the tokens of context in every sequence."""
    repacked = sum(tensor.nbytes for tensor in file.tensors.values() if _is_repacked(tensor, file))
    return Footprint(
        weights=file.file_bytes + repacked,
        mapped=file.file_bytes,
        cache=cache,
        scratch=resident_activations(file),
        vocabulary=2 * vocabulary_bytes(file),
        header=header_bytes(file),
        programs=CLIENT_PROCESS + LLAMA_PROCESS,
    )


# By ggml's repack.cpp: what is made into groups of 8 rows.
_ROWS_AT_ONCE = 8
_TIED = "token_embd.weight"


def _is_repacked(tensor: TensorInfo, file: GGUFFile) -> bool:
    """Whether llama.cpp makes a copy for its kernels beside the mapped file (its repack.cpp)."""
    is_matrix = len(tensor.shape) > 1 and tensor.shape[1] % _ROWS_AT_ONCE == 0
    is_multiplied = tensor.name != _TIED or "output.weight" not in file.tensors
    return is_matrix and is_multiplied and tensor.type.name in _repacked_types()


def _repacked_types() -> frozenset[str]:
    if platform.machine() in ("aarch64", "arm64"):
        return frozenset({"Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4"})
    types = frozenset({"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"})  # with AVX2, which nobody runs models without
    return types | {"Q2_K"} if "avx512f" in processor_flags() else types


def processor_flags() -> frozenset[str]:
    """As Linux names them; none elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split() for line in lines if line.startswith("flags")), []))
