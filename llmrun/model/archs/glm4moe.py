"""The `glm4moe` architecture: like dots1, but the queries, keys and values have biases, RoPE rotates part of each head,
and norms of heads are optional.

Models: GLM-4.5 to GLM-4.7, GLM-4.5V and GLM-4.6V (text), and Solar Open. Air models have no norms of heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs import dots1
from llmrun.model.archs.parts import draft_head
from llmrun.model.archs.parts.architecture import Architecture, PlanWriter, layers_ahead
from llmrun.model.archs.parts.experts import MixtureConfig, add_feed_forward, shared_size_by_count
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.plan.elementary import Pairing, Rope
from llmrun.model.plan.ops.experts import Gating

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.archs.parts.experts import Experts
    from llmrun.model.plan.plan import Plan
    from llmrun.model.plan.twin import Value


def read_config(file: GGUFFile) -> MixtureConfig:
    keys = Keys(file)
    shared = shared_size_by_count(keys)
    config = dots1.config_of(keys, shared=shared, unused=layers_ahead(keys), gating=Gating.SIGMOID)
    if keys.has("rope.dimension_sections"):
        return config.with_sections_of(keys, interleaved=False)
    return config


def plan(file: GGUFFile, config: MixtureConfig) -> Plan:
    c, w = config, PlanWriter(file, config)
    rope = w.rope(Pairing.NEOX)
    x = w.embed()
    for layer in range(c.layers):
        _add_layer(w, f"blk.{layer}", c, rope, None if layer < c.dense else c.experts, to=x)
    w.output_after_rmsnorm(x)
    w.leave_out_layers(c.layers, c.unused)
    return w.finished()


def draft_plan(file: GGUFFile, config: MixtureConfig) -> Plan | None:
    def add_layer(w: PlanWriter, block: str, x: Value) -> None:
        _add_layer(w, block, config, w.rope(Pairing.NEOX), config.experts, to=x)

    return draft_head.draft_plan(file, config, config.unused, add_layer)


def _add_layer(w: PlanWriter, block: str, c: MixtureConfig, rope: Rope, experts: Experts | None, to: Value) -> None:
    """Add a layer. The layer's feed-forward is dense if `experts` is None."""
    h = w.rmsnorm(f"{block}.attn_norm", to)
    q, k, v = w.queries_keys_values(block, h)
    if f"{block}.attn_q_norm.weight" in w.tensors:
        q, k = w.headnorm(f"{block}.attn_q_norm", q), w.headnorm(f"{block}.attn_k_norm", k)
    w.linear_add(f"{block}.attn_output", w.plan.attention(q, k, v, c.attention(), rope), to=to)
    h = w.rmsnorm(f"{block}.post_attention_norm", to)
    add_feed_forward(w, block, h, experts, c.shared, to=to)


ARCHITECTURE = Architecture(
    "glm4moe",
    read_config,
    plan,
    models="GLM-4.5 to 4.7; GLM-4.5V and 4.6V, text; Solar Open",
    notes="mixture of experts, one shared",
    draft_plan=draft_plan,
)
