"""The `deepseek` architecture: like llama, but all layers except the first few have experts and a shared expert.

Models: DeepSeek MoE 16B, which was the first DeepSeek model with experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import Architecture, PlanWriter
from llmrun.model.archs.parts.experts import (
    MixtureConfig,
    add_feed_forward,
    expert_size,
    experts_of,
    leading_dense,
    scale_of,
    shared_size_by_count,
)
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.plan.elementary import Pairing

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


def read_config(file: GGUFFile) -> MixtureConfig:
    keys = Keys(file)
    experts = experts_of(keys, expert_size(keys), normalized=False, scale=scale_of(keys))
    return MixtureConfig.of(keys, experts=experts, dense=leading_dense(keys), shared=shared_size_by_count(keys))


def plan(file: GGUFFile, config: MixtureConfig) -> Plan:
    c, w = config, PlanWriter(file, config)
    shape, rope = c.attention(), w.rope(Pairing.INTERLEAVED)
    x = w.embed()
    for layer in range(c.layers):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        q, k, v = w.queries_keys_values(block, h)
        a = w.plan.attention(q, k, v, shape, rope)
        w.linear_add(f"{block}.attn_output", a, to=x)
        h = w.rmsnorm(f"{block}.ffn_norm", x)
        add_feed_forward(w, block, h, None if layer < c.dense else c.experts, c.shared, to=x)
    w.output_after_rmsnorm(x)
    return w.finished()


ARCHITECTURE = Architecture(
    "deepseek", read_config, plan, models="DeepSeek MoE 16B (first generation)", notes="mixture of experts, one shared"
)
