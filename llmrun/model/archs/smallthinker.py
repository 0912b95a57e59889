"""The `smallthinker` architecture: experts with ReLU, which are chosen before attention from the layer's input.

The router reads the layer's input, so the experts can be loaded from disk during attention. In models
with a sliding window, every fourth layer attends to all positions and has no RoPE.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import (
    MOST_CONTEXT,
    Architecture,
    Hyperparameters,
    PlanWriter,
    Windows,
    layers_of,
)
from llmrun.model.archs.parts.experts import (
    Experts,
    expert_outputs,
    expert_size_or_share,
    experts_of,
    gating_of,
    routing_of,
)
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.plan.elementary import Pairing
from llmrun.model.plan.ops.activations import Activation

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan

_WINDOW = 4096  # llama.cpp uses this window even if the file specifies another window

_WINDOWS = Windows(every=4, first=True)


class Config(Hyperparameters, frozen=True):
    """The hyperparameters of smallthinker. `windows` contains the window of each layer, or 0 for no window."""

    windows: tuple[int, ...]
    experts: Experts


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    experts = experts_of(keys, expert_size_or_share(keys), normalized=True, gating=gating_of(keys))
    return Config.of(keys, windows=_windows(keys), experts=experts)


def _windows(keys: Keys) -> tuple[int, ...]:
    window = keys.integer("attention.sliding_window", 0, minimum=0, maximum=MOST_CONTEXT)
    if window not in (0, _WINDOW):
        raise keys.unsupported(f"a sliding window of {window} instead of {_WINDOW} positions")
    keys.refuse("attention.sliding_window_pattern", "rope.freq_base_swa")
    return tuple(window if layer % _WINDOWS.every else 0 for layer in range(layers_of(keys)))


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    rope = c.rope.rope(file, Pairing.NEOX)
    x = w.embed()
    for layer, window in enumerate(c.windows):
        block = f"blk.{layer}"
        routing = routing_of(w, block, x, c.experts)
        h = w.rmsnorm(f"{block}.attn_norm", x)
        q, k, v = w.queries_keys_values(block, h)
        a = w.plan.attention(q, k, v, c.attention(window), rope if window or not any(c.windows) else None)
        w.linear_add(f"{block}.attn_output", a, to=x)
        h = w.rmsnorm(f"{block}.ffn_norm", x)
        w.plan.combine(expert_outputs(w, block, h, c.experts, routing, Activation.RELU), routing, to=x)
    w.output_after_rmsnorm(x)
    return w.finished()


ARCHITECTURE = Architecture(
    "smallthinker",
    read_config,
    plan,
    models="SmallThinker",
    notes="mixture of experts, sliding window in 21B",
    windows=_WINDOWS,
)
