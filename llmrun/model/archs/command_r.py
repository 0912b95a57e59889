"""The `command-r` architecture: attention and feed-forward share one LayerNorm, and logits are scaled."""

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


class Config(Hyperparameters, frozen=True):
    logit_scale: float


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    refuse_experts(keys)
    return Config.of(keys, epsilon=LAYER_NORM_EPSILON, logit_scale=keys.scale("logit_scale", 1.0))


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    shape, rope = c.attention(), w.rope(Pairing.INTERLEAVED)
    x = w.embed()
    for layer in range(c.layers):
        block = f"blk.{layer}"
        h = w.layernorm(f"{block}.attn_norm", x)
        q, k, v = w.queries_keys_values(block, h)
        a = w.plan.attention(q, k, v, shape, rope)
        w.linear_add(f"{block}.ffn_down", w.swiglu(block, h), to=x)
        w.linear_add(f"{block}.attn_output", a, to=x)
    w.output_after_layernorm(x, scale=c.logit_scale)
    return w.finished()


ARCHITECTURE = Architecture("command-r", read_config, plan, models="Command R, Aya 23")
