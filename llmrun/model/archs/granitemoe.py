"""The `granitemoe` architecture: like granite, with experts as the feed-forward. Some models have a shared expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import Architecture, Hyperparameters, PlanWriter, feed_forward_of
from llmrun.model.archs.parts.experts import Experts, add_experts, experts_of, shared_expert, shared_size
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.plan.elementary import Pairing

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


class Config(Hyperparameters, frozen=True):
    """The hyperparameters of granitemoe.

    attention_scale  None if the scale is derived from the head size
    shared           number of features of the shared expert; 0 if there is no shared expert
    """

    embedding_scale: float
    attention_scale: float | None
    residual_scale: float
    logit_scale: float
    experts: Experts
    shared: int


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    residual_scale = keys.scale("residual_scale", 1.0)
    return Config.of(
        keys,
        embedding_scale=keys.scale("embedding_scale", 1.0),
        attention_scale=keys.scale("attention.scale", 1.0) if keys.number("attention.scale", 0.0) else None,
        residual_scale=residual_scale,
        logit_scale=keys.scale("logit_scale"),
        experts=experts_of(keys, feed_forward_of(keys), normalized=True, scale=residual_scale),
        shared=shared_size(keys, 0),
    )


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    shape, rope = c.attention(), w.rope(Pairing.INTERLEAVED)
    x = w.embed(scale=c.embedding_scale, image_scale=c.embedding_scale)
    for layer in range(c.layers):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        q, k, v = w.queries_keys_values(block, h)
        a = w.plan.attention(q, k, v, shape, rope, scale=c.attention_scale)
        w.plan.add(w.linear(f"{block}.attn_output", a, c.width), to=x, scale=c.residual_scale)
        h = w.rmsnorm(f"{block}.ffn_norm", x)
        if c.shared:
            w.plan.add(shared_expert(w, block, h, c.shared, c.width), to=x, scale=c.residual_scale)
        add_experts(w, block, h, c.experts, to=x)
    w.output_after_rmsnorm(x, scale=1 / c.logit_scale)
    return w.finished()


ARCHITECTURE = Architecture("granitemoe", read_config, plan, models="Granite 3 MoE", notes="mixture of experts")
