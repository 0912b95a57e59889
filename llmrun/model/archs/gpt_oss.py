"""The `gpt-oss` architecture: experts with biases, a sliding window in every other layer, and attention sinks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import Architecture, Hyperparameters, PlanWriter, Windows, windows_of
from llmrun.model.archs.parts.experts import Experts, add_experts, expert_size, experts_of
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.plan.elementary import Pairing
from llmrun.model.plan.ops.activations import Activation
from llmrun.model.plan.ops.experts import Gating

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan

_WINDOWS = Windows(every=2)


class Config(Hyperparameters, frozen=True):
    windows: tuple[int, ...]
    window_base: float
    experts: Experts


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    return Config.of(
        keys,
        windows=windows_of(keys, every=_WINDOWS.every),
        window_base=keys.positive("rope.freq_base_swa", keys.positive("rope.freq_base", 10000.0)),
        experts=experts_of(keys, expert_size(keys), normalized=False, gating=Gating.SOFTMAX_OF_CHOSEN),
    )


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    rope = w.rope(Pairing.NEOX)
    window_rope = rope if c.window_base == c.rope.base else c.rope.with_base(c.window_base).rope(file, Pairing.NEOX)
    x = w.embed()
    for layer in range(c.layers):
        block = f"blk.{layer}"
        window = c.windows[layer]
        h = w.rmsnorm(f"{block}.attn_norm", x)
        q, k, v = w.queries_keys_values(block, h)
        sinks = w.tensors.vector(f"{block}.attn_sinks.weight", c.heads)
        a = w.plan.attention(q, k, v, c.attention(window), window_rope if window else rope, sinks=sinks)
        w.linear_add(f"{block}.attn_output", a, to=x)
        h = w.rmsnorm(f"{block}.post_attention_norm", x)
        add_experts(w, block, h, c.experts, to=x, activation=Activation.CLAMPED_SILU)
    w.output_after_rmsnorm(x)
    return w.finished()


ARCHITECTURE = Architecture(
    "gpt-oss",
    read_config,
    plan,
    models="gpt-oss",
    notes="mixture of experts, sliding window, attention sinks",
    windows=_WINDOWS,
)
