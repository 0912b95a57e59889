"""The `jamba` architecture: most layers are Mamba-1 layers, and the others are attention layers without RoPE.

The feed-forward of some layers is a mixture of experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import (
    MOST_WIDTH,
    Architecture,
    Hyperparameters,
    PlanWriter,
    attention_layers,
    feed_forward_of,
)
from llmrun.model.archs.parts.experts import Experts, add_feed_forward, experts_of, has_experts
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.archs.parts.recurrent_layers import key_size_of, taps_of
from llmrun.model.plan.ops.activations import Activation

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan
    from llmrun.model.plan.twin import Value


class Config(Hyperparameters, frozen=True):
    """The hyperparameters of jamba.

    looks_back  True for each layer that is an attention layer
    inner       number of features that a Mamba-1 layer convolves and scans
    state_size  number of features of the state for each of the inner features
    step_rank   number of features from which the step sizes are computed
    taps        number of positions that the convolution covers, including the row's own
    experts     None if all layers are dense
    """

    looks_back: tuple[bool, ...]
    inner: int
    state_size: int
    step_rank: int
    taps: int
    experts: Experts | None


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    looks_back, kv_heads = attention_layers(keys)
    return Config.of(
        keys,
        kv_heads=kv_heads,
        looks_back=looks_back,
        inner=keys.features("ssm.inner_size", minimum=1, maximum=MOST_WIDTH),
        state_size=key_size_of(keys),
        step_rank=keys.integer("ssm.time_step_rank", minimum=1, maximum=MOST_WIDTH),
        taps=taps_of(keys),
        experts=experts_of(keys, feed_forward_of(keys), normalized=False) if has_experts(keys) else None,
    )


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    x = w.embed()
    for layer in range(c.layers):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        if c.looks_back[layer]:
            q, k, v = w.queries_keys_values(block, h)
            w.linear_add(f"{block}.attn_output", w.plan.attention(q, k, v, c.attention(), None), to=x)
        else:
            w.linear_add(f"{block}.ssm_out", _mamba(w, block, h, c), to=x)
        h = w.rmsnorm(f"{block}.ffn_norm", x)
        experts = c.experts if f"{block}.ffn_gate_inp.weight" in w.tensors else None
        add_feed_forward(w, block, h, experts, 0, to=x)
    w.output_after_rmsnorm(x)
    return w.finished()


def _mamba(w: PlanWriter, block: str, h: Value, config: Config) -> Value:
    """Compute a Mamba-1 layer for h, up to its output matrix (`ssm_out`).

    The input matrix (`ssm_in`) contains the rows of x, then the rows of z, the gate of the output. The matrix after
    the convolution (`ssm_x`) contains the rows of the step sizes, of B and of C. All three outputs are normalized.
    """
    plan, inner, size, rank, taps = w.plan, config.inner, config.state_size, config.step_rank, config.taps
    inputs = w.tensors.matrix(f"{block}.ssm_in.weight", h.width, 2 * inner)
    z = plan.linear(h, inputs.part(inner, inner))
    weight = w.tensors.vector(f"{block}.ssm_conv1d.weight", taps, inner).reshape(inner, taps)
    bias = w.tensors.vector(f"{block}.ssm_conv1d.bias", inner)
    [x] = plan.causal_convolution(plan.linear(h, inputs.part(0, inner)), weight, bias, (inner,))
    parts = w.tensors.matrix(f"{block}.ssm_x.weight", inner, rank + 2 * size)
    steps = w.rmsnorm(f"{block}.ssm_dt_norm", plan.linear(x, parts.part(0, rank)))
    b = w.rmsnorm(f"{block}.ssm_b_norm", plan.linear(x, parts.part(rank, size)))
    c = w.rmsnorm(f"{block}.ssm_c_norm", plan.linear(x, parts.part(rank + size, size)))
    y = plan.selective_scan(
        x,
        b,
        c,
        plan.linear(steps, w.tensors.matrix(f"{block}.ssm_dt.weight", rank, inner)),
        rate=w.tensors.vector(f"{block}.ssm_a", size, inner).reshape(inner, size),
        bias=w.tensors.vector(f"{block}.ssm_dt.bias", inner),
        skip=w.tensors.vector(f"{block}.ssm_d", inner),
    )
    return plan.gated(z, y, Activation.SILU)


ARCHITECTURE = Architecture(
    "jamba", read_config, plan, models="Jamba 1.5 and Reasoning", notes="Mamba-1, mixture of experts"
)
