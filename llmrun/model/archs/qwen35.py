"""The `qwen35` architecture: most layers are gated delta nets, and the others are gated attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts import draft_head
from llmrun.model.archs.parts.architecture import Architecture, PlanWriter, refuse_experts
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.archs.parts.recurrent_layers import DeltaConfig, add_delta_net, add_gated_attention, delta_inputs
from llmrun.model.plan.elementary import Pairing

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan
    from llmrun.model.plan.twin import Value


def read_config(file: GGUFFile) -> DeltaConfig:
    keys = Keys(file)
    refuse_experts(keys)
    return DeltaConfig.read(keys).with_sections_of(keys)


def plan(file: GGUFFile, config: DeltaConfig) -> Plan:
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
        _add_feed_forward(w, block, to=x)
    w.output_after_rmsnorm(x)
    w.leave_out_layers(c.layers, c.unused)
    return w.finished()


def draft_plan(file: GGUFFile, config: DeltaConfig) -> Plan | None:
    c = config

    def add_layer(w: PlanWriter, block: str, x: Value) -> None:
        h = w.rmsnorm(f"{block}.attn_norm", x)
        add_gated_attention(w, block, h, c.attention(), c.rope.rope(file, Pairing.NEOX), to=x)
        _add_feed_forward(w, block, to=x)

    return draft_head.draft_plan(file, c, c.unused, add_layer)


def _add_feed_forward(w: PlanWriter, block: str, to: Value) -> None:
    h = w.rmsnorm(f"{block}.post_attention_norm", to)
    w.linear_add(f"{block}.ffn_down", w.swiglu(block, h), to=to)


ARCHITECTURE = Architecture(
    "qwen35",
    read_config,
    plan,
    models="Qwen3.5 and Qwen3.6, dense",
    notes="gated delta nets",
    draft_plan=draft_plan,
)
