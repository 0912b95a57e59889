"""The `phi3` architecture: one matrix for queries, keys and values, and one matrix for gate and up.

Models: dense Phi-3, Phi-3.5 and Phi-4. The files specify a sliding window, but neither the models nor llama.cpp use
the window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import Architecture, Hyperparameters, PlanWriter, Windows, refuse_experts
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.plan.elementary import Pairing

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan

_WINDOWS = Windows(unused=True)  # some files contain a wrong window, and llama.cpp ignores it


def read_config(file: GGUFFile) -> Hyperparameters:
    keys = Keys(file)
    refuse_experts(keys)
    return Hyperparameters.of(keys)


def plan(file: GGUFFile, config: Hyperparameters) -> Plan:
    w = PlanWriter(file, config)
    shape, rope = config.attention(), w.rope(Pairing.NEOX)
    x = w.embed()
    for layer in range(config.layers):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        q, k, v = w.queries_keys_values(block, h)
        a = w.plan.attention(q, k, v, shape, rope)
        w.linear_add(f"{block}.attn_output", a, to=x)
        h = w.rmsnorm(f"{block}.ffn_norm", x)
        w.linear_add(f"{block}.ffn_down", w.fused_swiglu(block, h), to=x)
    w.output_after_rmsnorm(x)
    return w.finished()


ARCHITECTURE = Architecture(
    "phi3", read_config, plan, models="Phi-3, Phi-3.5, Phi-4, dense", notes="LongRoPE", windows=_WINDOWS
)
