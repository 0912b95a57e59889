"""The `qwen35` architecture: most layers are gated delta nets, and the others are gated attention."""

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
from llmrun.archs.parts.hyperparameters import Hyperparameters, layers_ahead, refuse_experts
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
    """The hyperparameters of qwen35.

    recurrent  whether each layer is a gated delta net
    sizes      sizes of the gated delta nets
    unused     number of layers at the end for multi-token prediction, which are not run
    """

    recurrent: tuple[bool, ...]
    sizes: RecurrentSizes
    unused: int


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    refuse_experts(keys)
    unused = layers_ahead(keys)
    config = Config.of(
        keys, unused_layers=unused, unused=unused, recurrent=recurrent_layers(keys), sizes=delta_sizes_of(keys)
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
        w.linear_add(f"{block}.ffn_down", w.swiglu(block, h), to=x)
    w.output_after_rmsnorm(x)
    w.leave_out_layers(c.layers, c.unused)
    return w.finished()
