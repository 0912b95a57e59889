"""The `granitehybrid` architecture: like granite or granitemoe, but most layers are Mamba-2 layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import (
    Architecture,
    Hyperparameters,
    PlanWriter,
    attention_layers,
    feed_forward_of,
)
from llmrun.model.archs.parts.experts import Experts, add_experts, experts_of, has_experts, shared_expert, shared_size
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.archs.parts.recurrent_layers import RecurrentSizes, mamba, recurrent_sizes_of
from llmrun.model.plan.elementary import Pairing

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan
    from llmrun.model.plan.twin import Value


class Config(Hyperparameters, frozen=True):
    """The hyperparameters of granitehybrid.

    looks_back       True for each layer that is an attention layer
    sizes            sizes of the Mamba-2 layers
    attention_scale  None if the scale is derived from the head size
    experts          None if all layers are dense
    shared           number of features of the shared expert; 0 if there is no shared expert
    """

    looks_back: tuple[bool, ...]
    sizes: RecurrentSizes
    embedding_scale: float
    attention_scale: float | None
    residual_scale: float
    logit_scale: float
    has_rope: bool
    experts: Experts | None
    shared: int


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    looks_back, kv_heads = attention_layers(keys)
    residual_scale = keys.scale("residual_scale", 1.0)
    experts = None
    if has_experts(keys):
        experts = experts_of(keys, feed_forward_of(keys), normalized=True, scale=residual_scale)
    return Config.of(
        keys,
        kv_heads=kv_heads,
        looks_back=looks_back,
        sizes=recurrent_sizes_of(keys),
        embedding_scale=keys.scale("embedding_scale", 1.0),
        attention_scale=keys.scale("attention.scale", 1.0) if keys.number("attention.scale", 0.0) else None,
        residual_scale=residual_scale,
        logit_scale=keys.scale("logit_scale", 1.0),
        has_rope=keys.flag("rope.scaling.finetuned", default=True),
        experts=experts,
        shared=shared_size(keys, 0),
    )


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    shape, rope = c.attention(), w.rope(Pairing.INTERLEAVED)
    x = w.embed(scale=c.embedding_scale, image_scale=c.embedding_scale)
    for layer in range(c.layers):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        if c.looks_back[layer]:
            q, k, v = w.queries_keys_values(block, h)
            a = w.plan.attention(q, k, v, shape, rope if c.has_rope else None, scale=c.attention_scale)
            y = w.linear(f"{block}.attn_output", a, c.width)
        else:
            y = w.linear(f"{block}.ssm_out", mamba(w, block, h, c.sizes), c.width)
        w.plan.add(y, to=x, scale=c.residual_scale)
        _add_feed_forward(w, block, x, c)
    w.output_after_rmsnorm(x, scale=1 / c.logit_scale)
    return w.finished()


def _add_feed_forward(w: PlanWriter, block: str, x: Value, c: Config) -> None:
    h = w.rmsnorm(f"{block}.ffn_norm", x)
    if c.experts is None:
        y = w.linear(f"{block}.ffn_down", w.swiglu(block, h), c.width)
        w.plan.add(y, to=x, scale=c.residual_scale)
        return
    if c.shared:
        w.plan.add(shared_expert(w, block, h, c.shared, c.width), to=x, scale=c.residual_scale)
    add_experts(w, block, h, c.experts, to=x)


ARCHITECTURE = Architecture(
    "granitehybrid", read_config, plan, models="Granite 4.0 H", notes="Mamba-2, mixture of experts in Tiny and Small"
)
