"""The `qwen3` architecture: like qwen2, with a norm for each query head and each key head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import Architecture, Hyperparameters, PlanWriter, refuse_experts
from llmrun.model.archs.parts.encoders import classified
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.plan.elementary import Pairing

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


def read_config(file: GGUFFile) -> Hyperparameters:
    keys = Keys(file)
    refuse_experts(keys)
    return Hyperparameters.of(keys)


def plan(file: GGUFFile, config: Hyperparameters, deepstack: int = 0) -> Plan:
    """Build the plan. A part of each row of an image is added after each of the first `deepstack` layers."""
    w = PlanWriter(file, config)
    shape, rope = config.attention(), w.rope(Pairing.NEOX)
    x = w.embed()
    for layer in range(config.layers):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        q, k, v = w.queries_keys_values(block, h)
        q, k = w.headnorm(f"{block}.attn_q_norm", q), w.headnorm(f"{block}.attn_k_norm", k)
        a = w.plan.attention(q, k, v, shape, rope)
        w.linear_add(f"{block}.attn_output", a, to=x)
        h = w.rmsnorm(f"{block}.ffn_norm", x)
        w.linear_add(f"{block}.ffn_down", w.swiglu(block, h), to=x)
        if layer < deepstack:
            w.plan.add_images(x, part=layer + 1)
    w.output_after_rmsnorm(x)
    assert w.plan.hidden is not None
    w.plan.hidden = classified(w, w.plan.hidden)  # Qwen3-Reranker answers yes or no
    return w.finished()


ARCHITECTURE = Architecture("qwen3", read_config, plan, models="Qwen3, dense, Qwen3-Embedding, Qwen3-Reranker")
