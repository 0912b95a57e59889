"""The `qwen3next` architecture: like qwen35moe, but consecutive heads of a gated delta net share a key head.

The rows of the matrix that computes gate and beta are grouped by key head. In older files, the rows of the matrix that
computes queries, keys, values and z are also grouped by key head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs import qwen35moe
from llmrun.model.archs.parts.architecture import Architecture, PlanWriter
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.archs.parts.recurrent_layers import DeltaInputs, RecurrentSizes, add_delta_net, add_gated_attention
from llmrun.model.archs.qwen35moe import Config, add_feed_forward, config_of
from llmrun.model.plan.elementary import Pairing

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan
    from llmrun.model.plan.twin import Value


def read_config(file: GGUFFile) -> Config:
    return config_of(Keys(file))


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    shape, rope = c.attention(), c.rope.rope(file, Pairing.NEOX)
    x = w.embed()
    for layer in range(c.layers):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        if c.recurrent[layer]:
            inputs, shared = _delta_inputs(w, block, h, c.sizes), c.sizes.heads // c.sizes.key_heads
            add_delta_net(w, block, inputs, c.sizes, to=x, shared=shared)
        else:
            add_gated_attention(w, block, h, shape, rope, to=x)
        add_feed_forward(w, block, c, to=x)
    w.output_after_rmsnorm(x)
    w.leave_out_layers(c.layers, c.unused)
    return w.finished()


def _delta_inputs(w: PlanWriter, block: str, h: Value, sizes: RecurrentSizes) -> DeltaInputs:
    s, each = sizes, sizes.heads // sizes.key_heads
    both = w.tensors.matrix(f"{block}.ssm_ba.weight", h.width, 2 * s.heads)
    beta, gate = (w.plan.linear(h, both.part_of_each(s.key_heads, first, each)) for first in (0, each))
    if f"{block}.ssm_in.weight" not in w.tensors:
        qkv, z = w.linear(f"{block}.attn_qkv", h, s.convolved), w.linear(f"{block}.attn_gate", h, s.values)
        return DeltaInputs(qkv, z, gate, beta)
    fused = w.tensors.matrix(f"{block}.ssm_in.weight", h.width, s.convolved + s.values)
    parts, first = [], 0
    for rows in (s.key_size, s.key_size, each * s.value_size, each * s.value_size):
        parts.append(w.plan.linear(h, fused.part_of_each(s.key_heads, first, rows)))
        first += rows
    q, k, v, z = parts
    return DeltaInputs(w.plan.concat(w.plan.concat(q, k), v), z, gate, beta)


ARCHITECTURE = Architecture(
    "qwen3next",
    read_config,
    plan,
    models="Qwen3-Next, Qwen3-Coder-Next",
    notes="gated delta nets, mixture of experts, one shared",
    draft_plan=qwen35moe.draft_plan,
)
