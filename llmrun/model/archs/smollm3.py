"""The `smollm3` architecture: like llama, but every fourth layer uses no RoPE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import Architecture, Hyperparameters, PlanWriter, refuse_experts
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.plan.elementary import Pairing

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


_NO_ROPE_EVERY = 4


def read_config(file: GGUFFile) -> Hyperparameters:
    keys = Keys(file)
    refuse_experts(keys)
    return Hyperparameters.of(keys)


def plan(file: GGUFFile, config: Hyperparameters) -> Plan:
    w = PlanWriter(file, config)
    shape, rope = config.attention(), w.rope(Pairing.INTERLEAVED)
    x = w.embed()
    for layer in range(config.layers):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        q, k, v = w.queries_keys_values(block, h)
        a = w.plan.attention(q, k, v, shape, rope if (layer + 1) % _NO_ROPE_EVERY else None)
        w.linear_add(f"{block}.attn_output", a, to=x)
        h = w.rmsnorm(f"{block}.ffn_norm", x)
        w.linear_add(f"{block}.ffn_down", w.swiglu(block, h), to=x)
    w.output_after_rmsnorm(x)
    return w.finished()


ARCHITECTURE = Architecture(
    "smollm3", read_config, plan, models="SmolLM3", notes="no position encoding in every fourth layer"
)
