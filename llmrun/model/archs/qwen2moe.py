"""The `qwen2moe` architecture: like qwen2, with experts as the feed-forward and a shared expert that has a gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import Architecture, Hyperparameters, PlanWriter, feed_forward_of
from llmrun.model.archs.parts.experts import (
    Experts,
    add_experts,
    add_gated_shared_expert,
    expert_size_or_share,
    experts_of,
    shared_size,
)
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.plan.elementary import Pairing

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


class Config(Hyperparameters, frozen=True):
    """The hyperparameters of qwen2moe. `shared` is the number of features of the shared expert."""

    experts: Experts
    shared: int


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    experts = experts_of(keys, expert_size_or_share(keys), normalized=False)
    return Config.of(keys, experts=experts, shared=shared_size(keys, feed_forward_of(keys)))


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    shape, rope = c.attention(), w.rope(Pairing.NEOX)
    x = w.embed()
    for layer in range(c.layers):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        q, k, v = w.queries_keys_values(block, h)
        a = w.plan.attention(q, k, v, shape, rope)
        w.linear_add(f"{block}.attn_output", a, to=x)
        h = w.rmsnorm(f"{block}.ffn_norm", x)
        add_gated_shared_expert(w, block, h, c.shared, to=x)
        add_experts(w, block, h, c.experts, to=x)
    w.output_after_rmsnorm(x)
    return w.finished()


ARCHITECTURE = Architecture(
    "qwen2moe", read_config, plan, models="Qwen1.5 MoE, Qwen2 57B", notes="mixture of experts, one shared"
)
