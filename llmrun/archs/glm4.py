"""The `glm4` architecture: norms before and after attention and feed-forward, one matrix for gate and up, and RoPE on
part of each head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.archs.parts.hyperparameters import Hyperparameters, refuse_experts
from llmrun.archs.parts.keys import Keys
from llmrun.archs.parts.writer import PlanWriter
from llmrun.plan.rope import Pairing

if TYPE_CHECKING:
    from llmrun.gguf.reader import GGUFFile
    from llmrun.plan.plan import Plan


def read_config(file: GGUFFile) -> Hyperparameters:
    keys = Keys(file)
    refuse_experts(keys)
    if keys.has("rope.dimension_sections"):
        raise keys.unsupported(f"image input ({keys.name('rope.dimension_sections')})")
    return Hyperparameters.of(keys)


def plan(file: GGUFFile, config: Hyperparameters) -> Plan:
    w = PlanWriter(file, config)
    shape, rope = config.attention(), w.rope(Pairing.INTERLEAVED)
    x = w.embed()
    for layer in range(config.layers):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        q, k, v = w.queries_keys_values(block, h)
        y = w.linear(f"{block}.attn_output", w.plan.attention(q, k, v, shape, rope), config.width)
        w.plan.add(w.rmsnorm(f"{block}.post_attention_norm", y), to=x)
        h = w.rmsnorm(f"{block}.ffn_norm", x)
        y = w.linear(f"{block}.ffn_down", w.fused_swiglu(block, h), config.width)
        w.plan.add(w.rmsnorm(f"{block}.post_ffw_norm", y), to=x)
    w.output_after_rmsnorm(x)
    return w.finished()
