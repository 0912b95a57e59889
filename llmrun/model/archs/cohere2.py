"""The `cohere2` architecture: like command-r, but three out of four layers use a sliding window, and every fourth layer
has no RoPE.

Models: Command R7B and Command A.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import (
    LAYER_NORM_EPSILON,
    Architecture,
    Hyperparameters,
    PlanWriter,
    Windows,
    refuse_experts,
    windows_of,
)
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.plan.elementary import Pairing

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan

_WINDOWS = Windows(every=4)


class Config(Hyperparameters, frozen=True):
    windows: tuple[int, ...]
    logit_scale: float


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    refuse_experts(keys)
    return Config.of(
        keys,
        epsilon=LAYER_NORM_EPSILON,
        windows=windows_of(keys, every=_WINDOWS.every),
        logit_scale=keys.scale("logit_scale"),
    )


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    rope = w.rope(Pairing.INTERLEAVED)
    x = w.embed()
    for layer in range(c.layers):
        block = f"blk.{layer}"
        window = c.windows[layer]
        h = w.layernorm(f"{block}.attn_norm", x)
        q, k, v = w.queries_keys_values(block, h)
        a = w.plan.attention(q, k, v, c.attention(window), rope if window else None)
        w.linear_add(f"{block}.ffn_down", w.swiglu(block, h), to=x)
        w.linear_add(f"{block}.attn_output", a, to=x)
    w.output_after_layernorm(x, scale=c.logit_scale)
    return w.finished()


ARCHITECTURE = Architecture(
    "cohere2", read_config, plan, models="Command R7B, Command A", notes="sliding window", windows=_WINDOWS
)
