"""The `qwen3moe` architecture: like qwen3, with experts as the feed-forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import Architecture, Hyperparameters, PlanWriter
from llmrun.model.archs.parts.experts import Experts, add_experts, expert_size_or_share, experts_of
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.plan.elementary import Pairing

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


class Config(Hyperparameters, frozen=True):
    experts: Experts


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    return Config.of(keys, experts=experts_of(keys, expert_size_or_share(keys), normalized=True))


def plan(file: GGUFFile, config: Config, deepstack: int = 0) -> Plan:
    """Build the plan. A part of each row of an image is added after each of the first `deepstack` layers."""
    c, w = config, PlanWriter(file, config)
    shape, rope = c.attention(), w.rope(Pairing.NEOX)
    x = w.embed()
    for layer in range(c.layers):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        q, k, v = w.queries_keys_values(block, h)
        q, k = w.headnorm(f"{block}.attn_q_norm", q), w.headnorm(f"{block}.attn_k_norm", k)
        a = w.plan.attention(q, k, v, shape, rope)
        w.linear_add(f"{block}.attn_output", a, to=x)
        h = w.rmsnorm(f"{block}.ffn_norm", x)
        add_experts(w, block, h, c.experts, to=x)
        if layer < deepstack:
            w.plan.add_images(x, part=layer + 1)
    w.output_after_rmsnorm(x)
    return w.finished()


ARCHITECTURE = Architecture(
    "qwen3moe", read_config, plan, models="Qwen3 30B and 235B, Qwen3-Coder", notes="mixture of experts"
)
