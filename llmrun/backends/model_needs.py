"""Computes a model's cost per token in bytes and multiply-adds. Rooflines compare it with the machine's limits.

For our own engine, the cost is computed from the plan. For other backends, it is computed from the GGUF header.
Activations are ignored because they are small compared to the weights. The cost from the header also ignores norms.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.cpu.lowering.needs import StepShape, kv_position_bytes
from llmrun.backends.cpu.ops.registry import needs_of, needs_of_step
from llmrun.backends.sizing.kv_bytes import KVBytes
from llmrun.backends.sizing.layer_heads import head_sizes
from llmrun.backends.sizing.layer_windows import layer_windows
from llmrun.backends.sizing.layers_kept import layers_of, layers_run, storing_layers
from llmrun.backends.sizing.recurrent_layers import layer_memories
from llmrun.formats.layouts.kv_types import parse_kv_type
from llmrun.model.plan.ops.attention import Attention
from llmrun.model.plan.ops.linear import Product
from llmrun.model.plan.state_shapes import MatrixState

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.formats.gguf.tensors import TensorInfo
    from llmrun.model.plan.plan import Plan

# Only one row per token is read from these tables, and it is not multiplied, so their cost is negligible.
_TABLES = re.compile(r"(^|[._])(token_embd|position_embd|token_types)\.weight$|tid2eid")
# Tensors of recurrent layers that have two dimensions in files but are multiplied element by element.
_ELEMENTWISE = re.compile(r"\.(ssm_a|ssm_d|ssm_conv1d\.weight|shortconv\.conv\.weight)$")
_OUTPUTS = ("output.weight", "token_embd.weight")  # without output.weight, token_embd.weight is also the output matrix
_LAYER = re.compile(r"blk\.(\d+)\.")
_EXPERTS = re.compile(r"blk\.(\d+)\..*_exps\.")


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """The cost of one token.

    weight_bytes  bytes of weights that decoding the token reads
    kv_read       bytes of keys, values and recurrent states that decoding the token reads or writes, as a function of
                  the number of tokens in the cache, including this one
    products      multiply-adds with weights when the token is prefilled without computing logits; attention is not
                  included because its multiply-adds are not int8
    """

    weight_bytes: int
    kv_read: KVBytes
    products: int


def needs_of_plan(plan: Plan, *, kv_type: str = "f16") -> ModelNeeds:
    """Return the cost per token on the CPU engine, counting weights with their packed size."""
    one, unasked = StepShape(1), StepShape(1, wanted=0)
    shapes = [op.kv.shape for op in plan.ops if isinstance(op, Attention)]
    linear = [needs_of(op, kv_type, unasked) for op in plan.ops if isinstance(op, Product)]
    return ModelNeeds(
        weight_bytes=needs_of_step(plan, kv_type, one).weight_bytes,
        kv_read=KVBytes.of_layers(
            ((shape.window, kv_position_bytes(shape, kv_type)) for shape in shapes), states=_state_traffic(plan)
        ),
        products=sum(needs.products + needs.float_products for needs in linear),
    )


def draft_shares(plan: Plan, head: Plan) -> tuple[float, float]:
    """Return the weights that a draft token and an additional row read, as shares of the bytes of a step of one row.

    Rows share all weights except those of experts: a second row usually has other experts.
    """
    one, two, draft = (
        needs_of_step(some, "f16", StepShape(rows, wanted=rows)).weight_bytes
        for some, rows in ((plan, 1), (plan, 2), (head, 1))
    )
    return draft / one, two / one - 1


def _state_traffic(plan: Plan) -> int:
    """Return the bytes of recurrent states that each token reads plus those that it writes."""
    shapes = [(group.shape, group.layers) for group in plan.states]
    return sum(2 * layers * shape.matrix_bytes for shape, layers in shapes if isinstance(shape, MatrixState))


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
