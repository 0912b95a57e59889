"""The `llama` architecture: RMSNorm, RoPE, grouped-query attention and SwiGLU.

This architecture covers SmolLM2, TinyLlama, Mistral and similar models. In Mixtral, the feed-forward is a mixture of
experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import structs

from llmrun.model.archs.parts.architecture import Architecture, Hyperparameters, PlanWriter
from llmrun.model.archs.parts.experts import Experts, add_experts, experts_of, has_experts
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.plan.elementary import Pairing

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


class Config(Hyperparameters, frozen=True):
    """The hyperparameters of llama. `growth` specifies how queries are scaled by their position (see Rope.growth)."""

    experts: Experts | None = None
    growth: tuple[float, int] | None = None


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    config = Config.of(keys)
    if not has_experts(keys):
        return config
    return structs.replace(config, experts=experts_of(keys, config.feed_forward, normalized=True))


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    shape, rope = c.attention(), w.rope(Pairing.INTERLEAVED)
    query_rope = rope if c.growth is None else replace(rope, growth=c.growth)
    x = w.embed()
    for layer in range(c.layers):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        q, k, v = w.queries_keys_values(block, h)
        a = w.plan.attention(q, k, v, shape, rope, query_rope=query_rope)
        w.linear_add(f"{block}.attn_output", a, to=x)
        h = w.rmsnorm(f"{block}.ffn_norm", x)
        if c.experts is None:
            w.linear_add(f"{block}.ffn_down", w.swiglu(block, h), to=x)
        else:
            add_experts(w, block, h, c.experts, to=x)
    w.output_after_rmsnorm(x)
    return w.finished()


ARCHITECTURE = Architecture(
    "llama", read_config, plan, models="Llama 1 to 3.3, SmolLM 1 and 2, TinyLlama, Mistral, Mixtral, Falcon 3"
)
