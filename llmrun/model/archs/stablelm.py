"""The `stablelm` architecture: LayerNorm, and RoPE on part of each head.

In layers without a second norm, attention and feed-forward have the same input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import (
    LAYER_NORM_EPSILON,
    Architecture,
    Hyperparameters,
    PlanWriter,
    refuse_experts,
)
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.plan.elementary import Pairing

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


def read_config(file: GGUFFile) -> Hyperparameters:
    keys = Keys(file)
    refuse_experts(keys)
    return Hyperparameters.of(keys, epsilon=LAYER_NORM_EPSILON)


def plan(file: GGUFFile, config: Hyperparameters) -> Plan:
    w = PlanWriter(file, config)
    shape, rope = config.attention(), w.rope(Pairing.NEOX)
    x = w.embed()
    for layer in range(config.layers):
        block = f"blk.{layer}"
        h = w.layernorm(f"{block}.attn_norm", x)
        q, k, v = w.queries_keys_values(block, h)
        a = w.plan.attention(q, k, v, shape, rope)
        w.linear_add(f"{block}.attn_output", a, to=x)
        if f"{block}.ffn_norm.weight" in w.tensors:
            h = w.layernorm(f"{block}.ffn_norm", x)
        w.linear_add(f"{block}.ffn_down", w.swiglu(block, h), to=x)
    w.output_after_layernorm(x)
    return w.finished()


ARCHITECTURE = Architecture("stablelm", read_config, plan, models="StableLM 3B, StableLM 2 1.6B")
