"""The `olmoe` architecture: like llama, but with experts, and with one norm over all query heads and one over all key
heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import Architecture, Hyperparameters, PlanWriter, feed_forward_of
from llmrun.model.archs.parts.experts import Experts, add_experts, experts_of
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.plan.elementary import Pairing

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


class Config(Hyperparameters, frozen=True):
    experts: Experts


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    return Config.of(keys, experts=experts_of(keys, feed_forward_of(keys), normalized=False))


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    shape, rope = c.attention(), w.rope(Pairing.NEOX)
    x = w.embed()
    for layer in range(c.layers):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        q, k, v = w.queries_keys_values(block, h)
        q, k = w.rmsnorm(f"{block}.attn_q_norm", q), w.rmsnorm(f"{block}.attn_k_norm", k)
        a = w.plan.attention(q, k, v, shape, rope)
        w.linear_add(f"{block}.attn_output", a, to=x)
        h = w.rmsnorm(f"{block}.ffn_norm", x)
        add_experts(w, block, h, c.experts, to=x)
    w.output_after_rmsnorm(x)
    return w.finished()


ARCHITECTURE = Architecture("olmoe", read_config, plan, models="OLMoE", notes="mixture of experts")
