"""The `qwen35moe` architecture: like qwen35, but with a mixture of experts and a gated shared expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmrun.archs.parts.delta_layers import (
    add_delta_net,
    add_gated_attention,
    delta_inputs,
    delta_sizes_of,
    recurrent_layers,
)
from llmrun.archs.parts.experts import (
    Experts,
    add_experts,
    add_gated_shared_expert,
    expert_size_or_share,
    experts_of,
    shared_size,
)
from llmrun.archs.parts.hyperparameters import Hyperparameters, layers_ahead, optional_feed_forward_of
from llmrun.archs.parts.keys import Keys
from llmrun.archs.parts.recurrent_sizes import RecurrentSizes
from llmrun.archs.parts.rope_settings import check_sections
from llmrun.archs.parts.writer import PlanWriter
from llmrun.plan.rope import Pairing

if TYPE_CHECKING:
    from llmrun.gguf.reader import GGUFFile
    from llmrun.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Config(Hyperparameters):
    """The hyperparameters of qwen35moe.

    recurrent  whether each layer is a gated delta net
    sizes      sizes of the gated delta nets
    shared     number of features of the shared expert
    unused     number of layers at the end for multi-token prediction, which are not run
    """

    recurrent: tuple[bool, ...]
    sizes: RecurrentSizes
    experts: Experts
    shared: int
    unused: int


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    unused, feed_forward = layers_ahead(keys), optional_feed_forward_of(keys)
    config = Config.of(
        keys,
        feed_forward=feed_forward,
        unused_layers=unused,
        unused=unused,
        recurrent=recurrent_layers(keys),
        sizes=delta_sizes_of(keys),
        experts=experts_of(keys, expert_size_or_share(keys), normalized=True),
        shared=shared_size(keys, feed_forward),
    )
    check_sections(keys, config.rope, config.head_size)
    return config


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
        h = w.rmsnorm(f"{block}.post_attention_norm", x)
        add_gated_shared_expert(w, block, h, c.shared, to=x)
        add_experts(w, block, h, c.experts, to=x)
    w.output_after_rmsnorm(x)
    w.leave_out_layers(c.layers, c.unused)
    return w.finished()
