"""The `gemma3` architecture: like gemma2, with norms for each head, separate RoPE settings for sliding-window layers,
and no soft caps."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

from llmrun.model.archs.gemma2 import attention_scale
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
from llmrun.model.plan.ops.activations import Activation

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.elementary import Rope
    from llmrun.model.plan.plan import Plan


_LAYERS_OF_27B = 62

_WINDOWS = Windows(every=6)


class Config(Hyperparameters, frozen=True):
    """The hyperparameters of gemma3. `logit_cap` is 0 if logits are not capped."""

    windows: tuple[int, ...]
    window_base: float
    logit_cap: float


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    refuse_experts(keys)
    return Config.of(
        keys,
        windows=windows_of(keys, every=_WINDOWS.every, default=_WINDOWS.default),
        window_base=keys.positive("rope.freq_base_swa", 10000.0),
        logit_cap=keys.number("final_logit_softcapping", 0.0),
    )


def window_rope_of(w: PlanWriter, config: Hyperparameters, base: float) -> Rope:
    """Return the Rope of sliding-window layers, which has a base of its own and no scaling."""
    return config.rope.unscaled().with_base(base).rope(w.tensors.file, Pairing.NEOX)


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    rope, window_rope = w.rope(Pairing.NEOX), window_rope_of(w, c, c.window_base)
    x = w.embed(scale=sqrt(c.width))
    for layer in range(c.layers):
        block = f"blk.{layer}"
        window = c.windows[layer]
        h = w.rmsnorm(f"{block}.attn_norm", x)
        q, k, v = w.queries_keys_values(block, h)
        q, k = w.headnorm(f"{block}.attn_q_norm", q), w.headnorm(f"{block}.attn_k_norm", k)
        layer_rope = window_rope if window else rope
        a = w.plan.attention(q, k, v, c.attention(window), layer_rope, scale=attention_scale(c, largest=_LAYERS_OF_27B))
        y = w.linear(f"{block}.attn_output", a, c.width)
        w.plan.add(w.rmsnorm(f"{block}.post_attention_norm", y), to=x)
        h = w.rmsnorm(f"{block}.ffn_norm", x)
        y = w.linear(f"{block}.ffn_down", w.gated(block, h, Activation.GELU), c.width)
        w.plan.add(w.rmsnorm(f"{block}.post_ffw_norm", y), to=x)
    w.output_after_rmsnorm(x)
    if c.logit_cap:
        w.plan.soft_cap_logits(c.logit_cap)
    return w.finished()


ARCHITECTURE = Architecture("gemma3", read_config, plan, models="Gemma 3", notes="sliding window", windows=_WINDOWS)
