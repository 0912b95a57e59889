"""The parts that Gemma 3n and Gemma 4 share: an input for every layer, and layers that share a KV cache."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from llmrun.model.plan.ops.activations import Activation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmrun.model.archs.parts.architecture import PlanWriter
    from llmrun.model.archs.parts.keys import Keys
    from llmrun.model.plan.elementary import Rope
    from llmrun.model.plan.shapes import AttentionShape
    from llmrun.model.plan.twin import Value

_LEAST_STORING = 2  # llama.cpp's minimum number of layers with a KV cache if other layers share caches


def check_storing(keys: Keys, shapes: Sequence[AttentionShape], storing: int) -> None:
    """Check that the other layers can reuse the KV caches of the first `storing` layers. Raises UnsupportedModel.

    In llama.cpp, other layers reuse the cache of the last storing layer or, with a sliding window, the second-to-last
    storing layer. The plan reuses the last layer of the same shape. In all existing models, both choices coincide.
    """
    for shape in set(shapes[storing:]):
        last = max((layer for layer in range(storing) if shapes[layer] == shape), default=None)
        if storing < _LEAST_STORING or last != storing - (2 if shape.window else 1):
            raise keys.unsupported("layers whose KV cache is not from the last layer of the same kind")


def inputs_of_layers(w: PlanWriter, x: Value, layers: int, table_width: int, vocabulary: int) -> Value:
    """Return the extra input of every layer, which has `table_width` features for each layer.

    The input is (table row of the token + normalized projection of the embedding) * sqrt(1/2).
    """
    width, half = layers * table_width, sqrt(0.5)
    table = w.tensors.matrix("per_layer_token_embd.weight", width, vocabulary)
    looked_up = w.plan.embed(table, sqrt(table_width) * half)
    projected = w.linear("per_layer_model_proj", x, width)
    weight = w.tensors.vector("per_layer_proj_norm.weight", table_width) * np.float32(half)
    # The model divides the projection by sqrt(width) first. Multiplying the norm's epsilon by the width is equivalent.
    total = w.plan.headnorm(projected, weight, w.epsilon * x.width)
    w.plan.add(looked_up, to=total)
    return total


def input_of_layer(
    w: PlanWriter, block: str, x: Value, of_layers: Value, layer: int, table_width: int, width: int
) -> Value:
    """Compute the term that a layer's extra input, gated by x, adds to the residual."""
    gate = w.linear(f"{block}.inp_gate", x, table_width)
    mine = w.plan.slice(of_layers, layer * table_width, table_width)
    y = w.linear(f"{block}.proj", w.plan.gated(gate, mine, Activation.GELU), width)
    return w.rmsnorm(f"{block}.post_norm", y)


def attention(
    w: PlanWriter,
    block: str,
    h: Value,
    shape: AttentionShape,
    rope: Rope | None,
    *,
    stores: bool,
    has_values: bool = True,
) -> Value:
    """Compute attention. Values are also normalized per head, but without a weight.

    Layers without a value matrix use the unnormalized keys as values. Layers that do not store keys and values attend
    to the keys and values of the last layer of the same shape.
    """
    size = shape.head_size
    if not stores:
        w.tensors.leave_out(*(f"{block}.{name}.weight" for name in ("attn_k", "attn_v", "attn_k_norm")))
        q = w.headnorm(f"{block}.attn_q_norm", w.queries(block, h, shape), size)
        return w.plan.attention_again(q, shape, rope, scale=1.0)
    if has_values:
        q, k, v = w.queries_keys_values(block, h, shape)
    else:
        q = w.queries(block, h, shape)
        k = v = w.linear(f"{block}.attn_k", h, shape.kv_heads * size)
    q, k = w.headnorm(f"{block}.attn_q_norm", q, size), w.headnorm(f"{block}.attn_k_norm", k, size)
    v = w.plan.headnorm(v, np.ones(size, np.float32), w.epsilon)
    return w.plan.attention(q, k, v, shape, rope, scale=1.0)
