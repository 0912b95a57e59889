"""The `olmo2` architecture: norms for queries, for keys, and for the outputs of attention and feed-forward.

The inputs of attention and feed-forward are not normalized. Models: OLMo 2 and OLMo 3. In OLMo 3, three out of four
layers use a sliding window and unscaled RoPE.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from llmrun.model.archs.parts.architecture import (
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


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    refuse_experts(keys)
    return Config.of(keys, windows=windows_of(keys, every=_WINDOWS.every, default=_WINDOWS.default))


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    rope = w.rope(Pairing.NEOX)
    window_rope = replace(c.rope.unscaled(), magnitude=1.0).rope(file, Pairing.NEOX)
    x = w.embed()
    for layer in range(c.layers):
        block = f"blk.{layer}"
        window = c.windows[layer]
        q, k, v = w.queries_keys_values(block, x)
        q, k = w.rmsnorm(f"{block}.attn_q_norm", q), w.rmsnorm(f"{block}.attn_k_norm", k)
        a = w.plan.attention(q, k, v, c.attention(window), window_rope if window else rope)
        y = w.linear(f"{block}.attn_output", a, c.width)
        w.plan.add(w.rmsnorm(f"{block}.post_attention_norm", y), to=x)
        y = w.linear(f"{block}.ffn_down", w.swiglu(block, x), c.width)
        w.plan.add(w.rmsnorm(f"{block}.post_ffw_norm", y), to=x)
    w.output_after_rmsnorm(x)
    return w.finished()


ARCHITECTURE = Architecture(
    "olmo2", read_config, plan, models="OLMo 2, OLMo 3", notes="sliding window in OLMo 3", windows=_WINDOWS
)
