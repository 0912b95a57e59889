"""Functions for the layers of Qwen3-Next and Qwen3.5: gated delta nets and gated attention.

They read the hyperparameters and add the ops to a plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from llmrun.model.archs.parts.hyperparameters import Hyperparameters, layers_ahead, layers_of
from llmrun.model.archs.parts.keys import MOST_LAYERS, Keys
from llmrun.model.archs.parts.recurrent_sizes import RecurrentSizes, recurrent_sizes_of
from llmrun.model.plan.ops.activations import Activation

if TYPE_CHECKING:
    from llmrun.model.archs.parts.writer import PlanWriter
    from llmrun.model.plan.kv_shapes import AttentionShape
    from llmrun.model.plan.rope import Rope
    from llmrun.model.plan.values import Value


@dataclass(frozen=True, slots=True)
class DeltaConfig(Hyperparameters):
    """The hyperparameters of models with gated delta nets.

    recurrent  whether each layer is a gated delta net
    sizes      sizes of the gated delta nets
    unused     number of layers at the end for multi-token prediction, which are not run
    """

    recurrent: tuple[bool, ...]
    sizes: RecurrentSizes
    unused: int

    @classmethod
    def read(cls, keys: Keys, **more: Any) -> Self:
        """Read the hyperparameters. `more` is passed to `of`. Raises BadGGUF and UnsupportedModel."""
        unused = layers_ahead(keys)
        recurrent, sizes = recurrent_layers(keys), delta_sizes_of(keys)
        return cls.of(keys, unused_layers=unused, unused=unused, recurrent=recurrent, sizes=sizes, **more)


class DeltaInputs(NamedTuple):
    """The inputs of a gated delta net.

    qkv   queries, keys and values before the convolution
    z     gate of the output, with as many features as the values
    gate  one feature per head, which determines the decay
    beta  one feature per head, which determines how much of a value is stored
    """

    qkv: Value
    z: Value
    gate: Value
    beta: Value


def recurrent_layers(keys: Keys) -> tuple[bool, ...]:
    """Return whether each layer is a gated delta net. The others are attention layers. Raises BadGGUF.

    If the file has no value per layer, every `full_attention_interval`-th layer is an attention layer.
    """
    key, layers = "attention.recurrent_layers", layers_of(keys)
    if keys.is_array(key):
        return tuple(bool(value) for value in keys.of_each_layer(key, layers))
    if keys.has(key):
        return (keys.flag(key, default=False),) * layers
    every = keys.integer("full_attention_interval", 4, minimum=1, maximum=MOST_LAYERS)
    return tuple((layer + 1) % every != 0 for layer in range(layers))


def delta_sizes_of(keys: Keys) -> RecurrentSizes:
    """Read the sizes of gated delta nets, whose keys and values have the same size.

    Raises BadGGUF and UnsupportedModel.
    """
    sizes = recurrent_sizes_of(keys)
    if sizes.key_size != sizes.value_size:
        values = sizes.heads * sizes.key_size
        raise keys.bad("ssm.inner_size", f"must be {values}, the heads times the state size, not {sizes.values}")
    return sizes


def delta_inputs(w: PlanWriter, block: str, h: Value, sizes: RecurrentSizes) -> DeltaInputs:
    """Compute the inputs of a gated delta net, each with a matrix of its own."""
    return DeltaInputs(
        qkv=w.linear(f"{block}.attn_qkv", h, sizes.convolved),
        z=w.linear(f"{block}.attn_gate", h, sizes.values),
        gate=w.linear(f"{block}.ssm_alpha", h, sizes.heads),
        beta=w.linear(f"{block}.ssm_beta", h, sizes.heads),
    )


def add_delta_net(
    w: PlanWriter, block: str, inputs: DeltaInputs, sizes: RecurrentSizes, to: Value, *, shared: int
) -> None:
    """Add the output of a gated delta net to `to`. Head h uses key head h // shared % key_heads."""
    s, name = sizes, f"{block}.ssm_conv1d.weight"
    weight = w.tensors.vector(name, s.taps, s.convolved).reshape(s.convolved, s.taps)
    q, k, v = w.plan.causal_convolution(inputs.qkv, weight, None, (s.keys, s.keys, s.values))
    out = w.plan.delta_rule(
        w.plan.l2norm(q, s.key_size, w.epsilon, scale=1 / sqrt(s.key_size)),
        w.plan.l2norm(k, s.key_size, w.epsilon),
        *(v, inputs.gate, inputs.beta),
        rate=w.tensors.vector(f"{block}.ssm_a", s.heads),
        bias=w.tensors.vector(f"{block}.ssm_dt.bias", s.heads),
        key_heads=s.key_heads,
        shared=shared,
    )
    normal = w.headnorm(f"{block}.ssm_norm", out, s.value_size)
    w.linear_add(f"{block}.ssm_out", w.plan.gated(inputs.z, normal, Activation.SILU), to=to)


def add_gated_attention(w: PlanWriter, block: str, h: Value, shape: AttentionShape, rope: Rope, to: Value) -> None:
    """Add the output of gated attention to `to`. Before the output matrix, it is multiplied by sigmoid(gate).

    The query matrix has, for each head, the rows of its query followed by those of its gate.
    """
    size, kv_width = shape.head_size, shape.kv_heads * shape.head_size
    both = w.tensors.matrix(f"{block}.attn_q.weight", h.width, 2 * shape.heads * size)
    q = w.plan.linear(h, both.part_of_each(shape.heads, 0, size))
    gate = w.plan.linear(h, both.part_of_each(shape.heads, size, size))
    k, v = w.linear(f"{block}.attn_k", h, kv_width), w.linear(f"{block}.attn_v", h, kv_width)
    q, k = w.headnorm(f"{block}.attn_q_norm", q, size), w.headnorm(f"{block}.attn_k_norm", k, size)
    a = w.plan.attention(q, k, v, shape, rope)
    w.linear_add(f"{block}.attn_output", w.plan.gated(gate, a, Activation.SIGMOID), to=to)
