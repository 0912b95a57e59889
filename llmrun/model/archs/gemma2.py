"""The `gemma2` architecture: like gemma, with additional norms after attention and feed-forward, a sliding window in
every other layer, and soft caps on scores and logits."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

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
    from llmrun.model.plan.plan import Plan


_LAYERS_OF_27B = 46

_WINDOWS = Windows(every=2, default=4096)


class Config(Hyperparameters, frozen=True):
    windows: tuple[int, ...]
    window_base: float
    score_cap: float
    logit_cap: float


def attention_scale(config: Hyperparameters, *, largest: int) -> float:
    """Return the attention scale.

    The scale is derived from the head size. In the largest model, which has `largest` layers, the scale is derived
    from the width divided by the number of heads.
    """
    size = config.width // config.heads if config.layers == largest else config.head_size
    return 1 / sqrt(size)


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    refuse_experts(keys)
    return Config.of(
        keys,
        windows=windows_of(keys, every=_WINDOWS.every, default=_WINDOWS.default),
        window_base=keys.positive("rope.freq_base_swa", keys.positive("rope.freq_base", 10000.0)),
        score_cap=keys.positive("attn_logit_softcapping", 50.0),
        logit_cap=keys.positive("final_logit_softcapping", 30.0),
    )


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    rope = w.rope(Pairing.NEOX)
    window_rope = rope if c.window_base == c.rope.base else c.rope.with_base(c.window_base).rope(file, Pairing.NEOX)
    x = w.embed(scale=sqrt(c.width))
    for layer in range(c.layers):
        block = f"blk.{layer}"
        window = c.windows[layer]
        h = w.rmsnorm(f"{block}.attn_norm", x)
        q, k, v = w.queries_keys_values(block, h)
        a = w.plan.attention(
            q,
            k,
            v,
            c.attention(window),
            window_rope if window else rope,
            scale=attention_scale(c, largest=_LAYERS_OF_27B),
            soft_cap=c.score_cap,
        )
        y = w.linear(f"{block}.attn_output", a, c.width)
        w.plan.add(w.rmsnorm(f"{block}.post_attention_norm", y), to=x)
        h = w.rmsnorm(f"{block}.ffn_norm", x)
        y = w.linear(f"{block}.ffn_down", w.gated(block, h, Activation.GELU), c.width)
        w.plan.add(w.rmsnorm(f"{block}.post_ffw_norm", y), to=x)
    w.output_after_rmsnorm(x)
    w.plan.soft_cap_logits(c.logit_cap)
    return w.finished()


ARCHITECTURE = Architecture(
    "gemma2", read_config, plan, models="Gemma 2", notes="sliding window, soft-capped logits", windows=_WINDOWS
)
