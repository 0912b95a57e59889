"""The `qwen35moe` architecture: like qwen35, but with a mixture of experts and a gated shared expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts import draft_head
from llmrun.model.archs.parts.architecture import Architecture, PlanWriter, optional_feed_forward_of
from llmrun.model.archs.parts.experts import (
    Experts,
    add_experts,
    add_gated_shared_expert,
    expert_size_or_share,
    experts_of,
    shared_size,
)
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.archs.parts.recurrent_layers import DeltaConfig, add_delta_net, add_gated_attention, delta_inputs
from llmrun.model.plan.elementary import Pairing

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan
    from llmrun.model.plan.twin import Value


class Config(DeltaConfig, frozen=True):
    """The hyperparameters of qwen35moe and qwen3next. `shared` is the number of features of the shared expert."""

    experts: Experts
    shared: int


def config_of(keys: Keys) -> Config:
    """Read the hyperparameters, except those of M-RoPE. Raises BadGGUF and UnsupportedModel."""
    feed_forward = optional_feed_forward_of(keys)
    return Config.read(
        keys,
        feed_forward=feed_forward,
        experts=experts_of(keys, expert_size_or_share(keys), normalized=True),
        shared=shared_size(keys, feed_forward),
    )


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    return config_of(keys).with_sections_of(keys)


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    shape, rope = c.attention(), c.rope.rope(file, Pairing.NEOX)
    x = w.embed()
    for layer in range(c.layers):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        if c.recurrent[layer]:
            add_delta_net(w, block, delta_inputs(w, block, h, c.sizes), c.sizes, to=x, shared=1)
        else:
            add_gated_attention(w, block, h, shape, rope, to=x)
        add_feed_forward(w, block, c, to=x)
    w.output_after_rmsnorm(x)
    w.leave_out_layers(c.layers, c.unused)
    return w.finished()


def draft_plan(file: GGUFFile, config: Config) -> Plan | None:
    c = config

    def add_layer(w: PlanWriter, block: str, x: Value) -> None:
        h = w.rmsnorm(f"{block}.attn_norm", x)
        add_gated_attention(w, block, h, c.attention(), c.rope.rope(file, Pairing.NEOX), to=x)
        add_feed_forward(w, block, c, to=x)

    return draft_head.draft_plan(file, c, c.unused, add_layer)


def add_feed_forward(w: PlanWriter, block: str, c: Config, to: Value) -> None:
    """Add the output of the shared expert and of the other experts to `to`."""
    h = w.rmsnorm(f"{block}.post_attention_norm", to)
    add_gated_shared_expert(w, block, h, c.shared, to=to)
    add_experts(w, block, h, c.experts, to=to)


ARCHITECTURE = Architecture(
    "qwen35moe",
    read_config,
    plan,
    models="Qwen3.5 and Qwen3.6 MoE",
    notes="gated delta nets, mixture of experts, one shared",
    draft_plan=draft_plan,
)
