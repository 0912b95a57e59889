"""Layers of recurrent models: short convolutions, Mamba-2, gated delta nets and gated attention.

The functions read the hyperparameters and add the ops to a plan. Gated delta nets and gated attention are the layers of
Qwen3-Next and Qwen3.5. Sizes (`ssm.*`) have limits that protect against malicious headers.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from msgspec import Struct

from llmrun.model.archs.parts.architecture import MOST_HEADS, MOST_WIDTH, Hyperparameters, layers_ahead, layers_of
from llmrun.model.archs.parts.keys import MOST_LAYERS, VECTOR, Keys
from llmrun.model.plan.ops.activations import Activation

if TYPE_CHECKING:
    from llmrun.model.archs.parts.architecture import PlanWriter
    from llmrun.model.plan.elementary import Rope
    from llmrun.model.plan.shapes import AttentionShape
    from llmrun.model.plan.twin import Value

_MOST_HEAD_SIZE: Final = 1024  # the head size of real models is at most 256
_LEAST_TAPS, _MOST_TAPS = 2, 16  # the limits for the length of the convolution's kernel, which is 4 in real models


class RecurrentSizes(Struct, frozen=True):
    """The sizes of a recurrent layer, whose state is a matrix per head.

    heads       number of value heads
    key_heads   number of key heads, a divisor of `heads`; Mamba-2 calls them groups
    key_size    number of features of a key
    value_size  number of features of a value
    taps        number of positions that the convolution covers, including the row's own
    """

    heads: int
    key_heads: int
    key_size: int
    value_size: int
    taps: int

    @property
    def keys(self) -> int:
        """The number of features of all keys."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """The number of features of all values."""
        return self.heads * self.value_size

    @property
    def convolved(self) -> int:
        """The number of features of the convolution, which covers queries, keys and values."""
        return 2 * self.keys + self.values


def recurrent_sizes_of(keys: Keys) -> RecurrentSizes:
    """Read the sizes. Raises BadGGUF and UnsupportedModel."""
    heads = keys.integer("ssm.time_step_rank", minimum=1, maximum=MOST_HEADS)
    key_heads = keys.integer("ssm.group_count", minimum=1, maximum=heads)
    if heads % key_heads:
        raise keys.bad("ssm.group_count", f"must be a divisor of {heads}, the number of heads, not {key_heads}")
    values = keys.integer("ssm.inner_size", minimum=1, maximum=MOST_WIDTH)
    if values % heads:
        raise keys.bad("ssm.inner_size", f"must be a multiple of {heads}, the number of heads, not {values}")
    value_size = values // heads
    if value_size % VECTOR or value_size > _MOST_HEAD_SIZE:
        raise keys.unsupported(f"recurrent heads of {value_size} features")
    return RecurrentSizes(
        heads=heads,
        key_heads=key_heads,
        key_size=key_size_of(keys),
        value_size=value_size,
        taps=taps_of(keys),
    )


def key_size_of(keys: Keys) -> int:
    return keys.features("ssm.state_size", minimum=1, maximum=_MOST_HEAD_SIZE)


def taps_of(keys: Keys) -> int:
    """Return the number of positions that the convolution covers. Raises BadGGUF and UnsupportedModel."""
    taps = keys.integer("ssm.conv_kernel", minimum=1, maximum=MOST_WIDTH)
    if not _LEAST_TAPS <= taps <= _MOST_TAPS:
        raise keys.unsupported(f"a convolution over {taps} positions")
    return taps


_MOST_SHORT_TAPS = 64  # the number is 3 in real models
_FEATURES_AT_ONCE = 16  # the vector size of the kernel


def short_convolution_taps(keys: Keys) -> int:
    """Return the number of positions that a convolution covers, including the row's own position. Raises BadGGUF."""
    return keys.integer("shortconv.l_cache", minimum=2, maximum=_MOST_SHORT_TAPS)


def add_convolution(w: PlanWriter, block: str, h: Value, taps: int, to: Value) -> None:
    """Add the convolution of h to `to`. Raises UnsupportedModel."""
    if to.width % _FEATURES_AT_ONCE:
        keys = Keys(w.tensors.file)
        raise keys.unsupported(
            f"the features of a convolution must be a multiple of {_FEATURES_AT_ONCE}, not {to.width}"
        )
    weight = w.tensors.vector(f"{block}.shortconv.conv.weight", taps, to.width).reshape(to.width, taps)
    mixed = w.plan.convolve(w.linear(f"{block}.shortconv.in_proj", h, 3 * to.width), weight)
    w.linear_add(f"{block}.shortconv.out_proj", mixed, to=to)


def mamba(w: PlanWriter, block: str, h: Value, sizes: RecurrentSizes) -> Value:
    """Compute a Mamba-2 layer for h, up to its output matrix (`ssm_out`). Raises BadGGUF and UnsupportedModel.

    The input matrix (`ssm_in`) contains the rows of z (the gate of the output), of x, B and C (which are convolved),
    and of dt (which determines the decay). x, B and C are the values, keys and queries of the recurrence.
    """
    s, plan = sizes, w.plan
    matrix = w.tensors.matrix(f"{block}.ssm_in.weight", h.width, s.values + s.convolved + s.heads)
    z = plan.linear(h, matrix.part(0, s.values))
    xbc = plan.linear(h, matrix.part(s.values, s.convolved))
    dt = plan.linear(h, matrix.part(s.values + s.convolved, s.heads))
    weight = w.tensors.vector(f"{block}.ssm_conv1d.weight", s.taps, s.convolved).reshape(s.convolved, s.taps)
    bias = w.tensors.optional_vector(f"{block}.ssm_conv1d.bias", s.convolved)
    x, b, c = plan.causal_convolution(xbc, weight, bias, (s.values, s.keys, s.keys))
    y = plan.ssd(
        x,
        b,
        c,
        dt,
        rate=w.tensors.vector(f"{block}.ssm_a", 1, s.heads),
        bias=w.tensors.vector(f"{block}.ssm_dt.bias", s.heads),
        skip=w.tensors.vector(f"{block}.ssm_d", 1, s.heads),
        key_heads=s.key_heads,
    )
    y = plan.gated(z, y, Activation.SILU)
    norm, features = f"{block}.ssm_norm.weight", s.values // s.key_heads
    if norm not in w.tensors:
        return y
    return plan.headnorm(y, w.tensors.vector(norm, features, s.key_heads).reshape(s.key_heads, features), w.epsilon)


class DeltaConfig(Hyperparameters, frozen=True):
    """The hyperparameters of models with gated delta nets.

    recurrent  True for each layer that is a gated delta net
    sizes      sizes of the gated delta nets
    unused     number of unused layers at the end, which are for multi-token prediction
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
    """Return True for each layer that is a gated delta net. All other layers are attention layers. Raises BadGGUF.

    If the file contains no value per layer, every `full_attention_interval`-th layer is an attention layer.
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
    """Compute the inputs of a gated delta net, each with a separate matrix."""
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
        v,
        inputs.gate,
        inputs.beta,
        rate=w.tensors.vector(f"{block}.ssm_a", s.heads),
        bias=w.tensors.vector(f"{block}.ssm_dt.bias", s.heads),
        key_heads=s.key_heads,
        shared=shared,
    )
    normal = w.headnorm(f"{block}.ssm_norm", out, s.value_size)
    w.linear_add(f"{block}.ssm_out", w.plan.gated(inputs.z, normal, Activation.SILU), to=to)


def add_gated_attention(w: PlanWriter, block: str, h: Value, shape: AttentionShape, rope: Rope, to: Value) -> None:
    """Add the output of gated attention to `to`. The output matrix is applied after multiplying by sigmoid(gate).

    For each head, the query matrix contains the rows of the query followed by the rows of the gate.
    """
    size, kv_width = shape.head_size, shape.kv_heads * shape.head_size
    both = w.tensors.matrix(f"{block}.attn_q.weight", h.width, 2 * shape.heads * size)
    q = w.plan.linear(h, both.part_of_each(shape.heads, 0, size))
    gate = w.plan.linear(h, both.part_of_each(shape.heads, size, size))
    k, v = w.linear(f"{block}.attn_k", h, kv_width), w.linear(f"{block}.attn_v", h, kv_width)
    q, k = w.headnorm(f"{block}.attn_q_norm", q, size), w.headnorm(f"{block}.attn_k_norm", k, size)
    a = w.plan.attention(q, k, v, shape, rope)
    w.linear_add(f"{block}.attn_output", w.plan.gated(gate, a, Activation.SIGMOID), to=to)
