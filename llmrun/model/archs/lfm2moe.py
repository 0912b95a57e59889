"""The `lfm2moe` architecture: like lfm2, but all layers except the first few have experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import Architecture, Hyperparameters, PlanWriter, attention_layers
from llmrun.model.archs.parts.experts import (
    Experts,
    add_feed_forward,
    expert_size,
    experts_of,
    gating_of,
    leading_dense,
)
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.archs.parts.recurrent_layers import add_convolution, short_convolution_taps
from llmrun.model.plan.elementary import Pairing

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


class Config(Hyperparameters, frozen=True):
    """The hyperparameters of lfm2moe.

    looks_back  True for each layer that is an attention layer
    dense       number of layers before the first layer with experts
    """

    looks_back: tuple[bool, ...]
    taps: int
    experts: Experts
    dense: int


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    looks_back, kv_heads = attention_layers(keys)
    return Config.of(
        keys,
        kv_heads=kv_heads,
        looks_back=looks_back,
        taps=short_convolution_taps(keys),
        experts=experts_of(keys, expert_size(keys), normalized=True, gating=gating_of(keys)),
        dense=leading_dense(keys),
    )


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    shape, rope = c.attention(), w.rope(Pairing.NEOX)
    x = w.embed()
    for layer in range(c.layers):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        if c.looks_back[layer]:
            q, k, v = w.queries_keys_values(block, h)
            q, k = w.headnorm(f"{block}.attn_q_norm", q), w.headnorm(f"{block}.attn_k_norm", k)
            w.linear_add(f"{block}.attn_output", w.plan.attention(q, k, v, shape, rope), to=x)
        else:
            add_convolution(w, block, h, c.taps, to=x)
        h = w.rmsnorm(f"{block}.ffn_norm", x)
        add_feed_forward(w, block, h, None if layer < c.dense else c.experts, 0, to=x)
    w.output_after_rmsnorm(x, norm="token_embd_norm")
    return w.finished()


ARCHITECTURE = Architecture(
    "lfm2moe", read_config, plan, models="LFM2 8B and 24B", notes="short convolutions, mixture of experts"
)
