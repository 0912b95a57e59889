"""The cost of a token, computed from the GGUF header without a plan. It checks the cost that plans have.

It is computed for any architecture, without norms.
"""

from __future__ import annotations

import re
from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.fitting import ModelNeeds
from llmrun.backends.sizing import (
    KVBytes,
    head_sizes,
    layer_memories,
    layer_windows,
    layers_of,
    layers_run,
    storing_layers,
)
from llmrun.formats.layouts.kv import parse_kv_type

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.formats.gguf.tensors import TensorInfo

# Only one row per token is read from these tables, and it is not multiplied, so their cost is negligible.
_TABLES = re.compile(r"(^|[._])(token_embd|position_embd|token_types)\.weight$|tid2eid")
# Tensors of recurrent layers that have two dimensions in files but are multiplied element by element.
_ELEMENTWISE = re.compile(r"\.(ssm_a|ssm_d|ssm_conv1d\.weight|shortconv\.conv\.weight)$")
_OUTPUTS = ("output.weight", "token_embd.weight")  # without output.weight, token_embd.weight is also the output matrix
_LAYER = re.compile(r"blk\.(\d+)\.")
_EXPERTS = re.compile(r"blk\.(\d+)\..*_exps\.")


def needs_of_file(file: GGUFFile, *, kv_type: str = "f16") -> ModelNeeds:
    """Return the cost per token, computed from the GGUF header alone. This works for any architecture.

    Matrices are counted with their size in the file. In a mixture of experts, only the experts that a token uses are
    counted. Raises BadGGUF for metadata of the wrong type.
    """
    tied = "output.weight" not in file.tensors
    idle, run = _idle(file), layers_run(file)
    matrices = [
        tensor
        for name, tensor in file.tensors.items()
        if len(tensor.shape) > 1 and _is_multiplied(tensor, tied) and _is_run(tensor, run) and name not in idle
    ]
    inner = [tensor for tensor in matrices if tensor.name not in _OUTPUTS]
    return ModelNeeds(
        weight_bytes=round(sum(tensor.nbytes * _share_used(file, tensor) for tensor in matrices)),
        kv_read=_kv_read(file, kv_type),
        products=round(sum(prod(tensor.shape) * _share_used(file, tensor) for tensor in inner)),
    )


def _idle(file: GGUFFile) -> set[str]:
    """Return the names of the key and value matrices in layers that reuse the cache of another layer."""
    return {f"blk.{n}.attn_{part}.weight" for n in range(storing_layers(file), layers_of(file)) for part in "kv"}


def _is_multiplied(tensor: TensorInfo, tied: bool) -> bool:
    if tensor.name == "token_embd.weight":
        return tied
    return not _TABLES.search(tensor.name) and not _ELEMENTWISE.search(tensor.name)


def _is_run(tensor: TensorInfo, layers: int) -> bool:
    found = _LAYER.match(tensor.name)
    return found is None or int(found[1]) < layers


def _share_used(file: GGUFFile, tensor: TensorInfo) -> Fraction:
    """Return the fraction of a tensor's weights that one token uses."""
    found = _EXPERTS.match(tensor.name)
    if found is None:
        return Fraction(1)
    architecture = file.string("general.architecture")
    experts = file.integer(f"{architecture}.expert_count", 0, minimum=0)
    used = int(_of_each_layer(file, f"{architecture}.expert_used_count", experts)[int(found[1])])
    return Fraction(used, experts) if used < experts else Fraction(1)


def _kv_read(file: GGUFFile, kv_type: str) -> KVBytes:
    architecture = file.string("general.architecture")
    key = f"{architecture}.attention.head_count"
    heads = _of_each_layer(file, key, 0)
    kv_heads = _of_each_layer(file, f"{key}_kv", heads)
    most = int(heads.max())
    size = file.integer(f"{architecture}.embedding_length", minimum=1) // most if most else 0
    windows = layer_windows(file, len(kv_heads))
    head_bytes = [parse_kv_type(kv_type).position_bytes(*sizes) for sizes in head_sizes(file, windows, size)]
    memories = layer_memories(file)
    kv = kv_heads * head_bytes * [memory.attends for memory in memories]
    layers = list(zip(windows, kv.tolist(), strict=True))
    return KVBytes.of_layers(layers[: layers_run(file)], states=2 * sum(memory.matrices for memory in memories))


def _of_each_layer(file: GGUFFile, key: str, default: int | NDArray[np.int64]) -> NDArray[np.int64]:
    """Read a per-layer number as int64[layers]. The file may contain one number for all layers, or an array."""
    layers = layers_of(file)
    if isinstance(file.metadata.get(key), np.ndarray):
        return np.resize(file.integers(key).astype(np.int64), layers)
    return np.broadcast_to(np.asarray(file.integer(key, default), np.int64), layers)
