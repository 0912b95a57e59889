"""The `exaone4` architecture: like olmo2, with norms for each head.

In EXAONE 4.0 32B, three out of four layers use a sliding window, and every fourth layer has no RoPE.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import (
    Architecture,
    Hyperparameters,
    PlanWriter,
    Windows,
    layers_of,
    refuse_experts,
    windows_of,
)
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.plan.elementary import Pairing

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


_WINDOWS = Windows(every=4, default=4096, only_with=64)  # the 32B model has 64 layers


class Config(Hyperparameters, frozen=True):
    windows: tuple[int, ...]


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    refuse_experts(keys)
    layers = layers_of(keys)
    if layers != _WINDOWS.only_with:  # models of other sizes have no sliding window, even if the file specifies one
        return Config.of(keys, windows=(0,) * layers)
    return Config.of(keys, windows=windows_of(keys, every=_WINDOWS.every, default=_WINDOWS.default))


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    rope = w.rope(Pairing.NEOX)
    x = w.embed()
    for layer in range(c.layers):
        block = f"blk.{layer}"
        window = c.windows[layer]
        q, k, v = w.queries_keys_values(block, x)
        q, k = w.headnorm(f"{block}.attn_q_norm", q), w.headnorm(f"{block}.attn_k_norm", k)
        a = w.plan.attention(q, k, v, c.attention(window), rope if window or not any(c.windows) else None)
        y = w.linear(f"{block}.attn_output", a, c.width)
        w.plan.add(w.rmsnorm(f"{block}.post_attention_norm", y), to=x)
        y = w.linear(f"{block}.ffn_down", w.swiglu(block, x), c.width)
        w.plan.add(w.rmsnorm(f"{block}.post_ffw_norm", y), to=x)
    w.output_after_rmsnorm(x)
    return w.finished()


ARCHITECTURE = Architecture(
    "exaone4", read_config, plan, models="EXAONE 4.0", notes="sliding window in 32B", windows=_WINDOWS
)
