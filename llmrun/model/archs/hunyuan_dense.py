"""The `hunyuan-dense` architecture: like qwen3, but queries and keys are normalized after RoPE instead of before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.formats.gguf.metadata import MAX_EXPERTS
from llmrun.model.archs.parts.architecture import Architecture, Hyperparameters, PlanWriter, refuse_experts
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.plan.elementary import Pairing

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.elementary import Rope
    from llmrun.model.plan.plan import Plan
    from llmrun.model.plan.twin import Value


def read_config(file: GGUFFile) -> Hyperparameters:
    keys = Keys(file)
    if keys.integer("expert_count", 0, minimum=0, maximum=MAX_EXPERTS) != 1:  # a file with one expert is dense
        refuse_experts(keys)
    keys.refuse("rope.scaling.alpha", "rope.dimension_sections")  # only image models have these keys
    return Hyperparameters.of(keys)


def plan(file: GGUFFile, config: Hyperparameters) -> Plan:
    w = PlanWriter(file, config)
    rope = w.rope(Pairing.NEOX)
    x = w.embed()
    for layer in range(config.layers):
        block = f"blk.{layer}"
        add_attention(w, block, config, rope, to=x)
        h = w.rmsnorm(f"{block}.ffn_norm", x)
        w.linear_add(f"{block}.ffn_down", w.swiglu(block, h), to=x)
    w.output_after_rmsnorm(x)
    return w.finished()


def add_attention(w: PlanWriter, block: str, config: Hyperparameters, rope: Rope, to: Value) -> None:
    """Compute attention on the normalized rows of `to`, and add the output to `to`."""
    q, k, v = w.queries_keys_values(block, w.rmsnorm(f"{block}.attn_norm", to))
    q, k = (w.plan.rotated(value, config.head_size, rope) for value in (q, k))
    q, k = w.headnorm(f"{block}.attn_q_norm", q), w.headnorm(f"{block}.attn_k_norm", k)
    w.linear_add(f"{block}.attn_output", w.plan.attention(q, k, v, config.attention(), None), to=to)


ARCHITECTURE = Architecture("hunyuan-dense", read_config, plan, models="Hunyuan 0.5B to 7B")
