"""The `lfm2` architecture: most layers are short convolutions over positions, and the others are attention layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import (
    MOST_CONTEXT,
    Architecture,
    Hyperparameters,
    PlanWriter,
    Windows,
    attention_layers,
    refuse_experts,
)
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.archs.parts.recurrent_layers import add_convolution, short_convolution_taps
from llmrun.model.plan.elementary import Pairing

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan

_WINDOWS = Windows(every=0)


class Config(Hyperparameters, frozen=True):
    """The hyperparameters of lfm2.

    looks_back  True for each layer that is an attention layer
    window      window of the attention layers; 0 if attention covers all earlier positions
    """

    looks_back: tuple[bool, ...]
    taps: int
    window: int


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    refuse_experts(keys)
    looks_back, kv_heads = attention_layers(keys)
    return Config.of(
        keys,
        kv_heads=kv_heads,
        looks_back=looks_back,
        taps=short_convolution_taps(keys),
        window=keys.integer("attention.sliding_window", 0, minimum=0, maximum=MOST_CONTEXT),
    )


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    shape, rope = c.attention(c.window), w.rope(Pairing.NEOX)
    x = w.embed()
    for layer in range(c.layers):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        if c.looks_back[layer]:
            q, k, v = w.queries_keys_values(block, h)
            q, k = w.headnorm(f"{block}.attn_q_norm", q), w.headnorm(f"{block}.attn_k_norm", k)
            w.linear_add(f"{block}.attn_output", w.plan.attention(q, k, v, shape, rope), to=x)
        else:
            add_convolution(w, block, h, c.taps, to=x)
        h = w.rmsnorm(f"{block}.ffn_norm", x)
        w.linear_add(f"{block}.ffn_down", w.swiglu(block, h), to=x)
    w.output_after_rmsnorm(x, norm="token_embd_norm")
    return w.finished()


ARCHITECTURE = Architecture(
    "lfm2", read_config, plan, models="LFM2, LFM2.5", notes="short convolutions", windows=_WINDOWS
)
