"""The `gemma` architecture: scaled embeddings, a head size that does not depend on the width, and GELU."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import Architecture, Hyperparameters, PlanWriter, refuse_experts
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.plan.elementary import Pairing
from llmrun.model.plan.ops.activations import Activation

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


def read_config(file: GGUFFile) -> Hyperparameters:
    keys = Keys(file)
    refuse_experts(keys)
    return Hyperparameters.of(keys)


def plan(file: GGUFFile, config: Hyperparameters) -> Plan:
    w = PlanWriter(file, config)
    shape, rope = config.attention(), w.rope(Pairing.NEOX)
    x = w.embed(scale=sqrt(config.width))
    for layer in range(config.layers):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        q, k, v = w.queries_keys_values(block, h)
        a = w.plan.attention(q, k, v, shape, rope)
        w.linear_add(f"{block}.attn_output", a, to=x)
        h = w.rmsnorm(f"{block}.ffn_norm", x)
        w.linear_add(f"{block}.ffn_down", w.gated(block, h, Activation.GELU), to=x)
    w.output_after_rmsnorm(x)
    return w.finished()


ARCHITECTURE = Architecture("gemma", read_config, plan, models="Gemma")
