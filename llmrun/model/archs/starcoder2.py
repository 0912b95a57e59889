"""The `starcoder2` architecture: LayerNorm, a feed-forward without a gate, and biases in all layers."""

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
from llmrun.model.plan.ops.activations import Activation

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
        h = w.layernorm(f"{block}.ffn_norm", x)
        up = w.linear(f"{block}.ffn_up", h, config.feed_forward)
        w.linear_add(f"{block}.ffn_down", w.plan.activate(up, Activation.GELU), to=x)
    w.output_after_layernorm(x)
    return w.finished()


ARCHITECTURE = Architecture("starcoder2", read_config, plan, models="StarCoder2")
