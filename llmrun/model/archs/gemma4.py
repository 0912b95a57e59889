"""The `gemma4` architecture: like gemma3, but sliding-window layers and other layers differ in head size and in head
count.

The small models (E2B, E4B) have a second embedding table with an input for every layer, and their last layers attend to
the keys and values of earlier layers. The layers of 26B-A4B have experts in addition to the feed-forward.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from llmrun.model.archs.parts.architecture import (
    MOST_HEADS,
    MOST_WIDTH,
    Architecture,
    Hyperparameters,
    PlanWriter,
    head_size_of,
    heads_of,
    layers_of,
    window_head_size_of,
    windows_of,
)
from llmrun.model.archs.parts.experts import Experts, expert_outputs, expert_size, experts_of, has_experts
from llmrun.model.archs.parts.gemma_layers import attention, check_storing, input_of_layer, inputs_of_layers
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.archs.parts.rope_settings import rotated_features
from llmrun.model.plan.elementary import Pairing
from llmrun.model.plan.ops.activations import Activation
from llmrun.model.plan.shapes import AttentionShape

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.elementary import Rope
    from llmrun.model.plan.plan import Plan
    from llmrun.model.plan.twin import Value


class Config(Hyperparameters, frozen=True):
    """The hyperparameters of gemma4.

    shapes          attention shape of each layer
    feed_forwards   number of feed-forward features of each layer
    window_rotated  number of features of a head that are rotated in sliding-window layers
    window_base     RoPE base in sliding-window layers
    storing         number of layers before the first layer that uses the KV cache of an earlier layer
    table_width     number of features for each layer in the second embedding table; 0 if there is no such table
    logit_cap       0 if logits are not capped
    experts         None if all layers are dense
    """

    shapes: tuple[AttentionShape, ...]
    feed_forwards: tuple[int, ...]
    window_rotated: int
    window_base: float
    storing: int
    table_width: int
    logit_cap: float
    experts: Experts | None


# --- the metadata -----------------------------------------------------------------------------------------------------


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    shapes = _shapes(keys)
    feed_forwards = keys.in_each_layer("feed_forward_length", len(shapes), minimum=1, maximum=MOST_WIDTH)
    rotated = rotated_features(keys, "rope.dimension_count", head_size_of(keys), head_size_of(keys))
    return Config.of_largest(
        keys,
        kv_heads=max(shape.kv_heads for shape in shapes),
        feed_forward=max(feed_forwards),
        shapes=shapes,
        feed_forwards=feed_forwards,
        window_rotated=rotated_features(keys, "rope.dimension_count_swa", rotated, window_head_size_of(keys)),
        window_base=keys.positive("rope.freq_base_swa", 10000.0),
        storing=_storing(keys, shapes),
        table_width=keys.features("embedding_length_per_layer_input", minimum=0, maximum=MOST_WIDTH),
        logit_cap=keys.number("final_logit_softcapping", 30.0),
        experts=experts_of(keys, expert_size(keys), normalized=True) if has_experts(keys) else None,
    )


def _shapes(keys: Keys) -> tuple[AttentionShape, ...]:
    heads, size, window_size = heads_of(keys), head_size_of(keys), window_head_size_of(keys)
    if not keys.is_array("attention.sliding_window_pattern"):
        raise keys.bad("attention.sliding_window_pattern", "must be an array of booleans")
    windows = windows_of(keys, every=1)
    kv_heads = keys.in_each_layer("attention.head_count_kv", layers_of(keys), heads, minimum=1, maximum=MOST_HEADS)
    for count in kv_heads:
        if heads % count:
            raise keys.bad("attention.head_count_kv", f"must be a divisor of {heads}, the number of heads, not {count}")
    return tuple(
        AttentionShape(heads, count, window_size if window else size, window)
        for count, window in zip(kv_heads, windows, strict=True)
    )


def _storing(keys: Keys, shapes: tuple[AttentionShape, ...]) -> int:
    """Return the number of layers that store the keys and values that the other layers reuse."""
    storing = len(shapes) - keys.integer("attention.shared_kv_layers", 0, minimum=0, maximum=len(shapes) - 1)
    check_storing(keys, shapes, storing)
    return storing


# --- the plan ---------------------------------------------------------------------------------------------------------


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    rope = None if all(shape.window for shape in c.shapes) else _rope_with_factors(w, c)
    window_settings = c.rope.unscaled().with_base(c.window_base).with_dimensions(c.window_rotated)
    window_rope = window_settings.rope(file, Pairing.NEOX)
    w.plan.ahead_in_windows_only = True
    x = w.embed(scale=sqrt(c.width))
    of_layers = inputs_of_layers(w, x, c.layers, c.table_width, c.vocabulary_size) if c.table_width else None
    for layer, shape in enumerate(c.shapes):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        rotation, has_values = window_rope if shape.window else rope, _has_values(w, block)
        a = attention(w, block, h, shape, rotation, stores=layer < c.storing, has_values=has_values)
        y = w.linear(f"{block}.attn_output", a, c.width)
        w.plan.add(w.rmsnorm(f"{block}.post_attention_norm", y), to=x)
        y = _feed_forward(w, block, x, c.feed_forwards[layer], c.experts)
        w.plan.add(w.rmsnorm(f"{block}.post_ffw_norm", y), to=x)
        if of_layers is not None:
            w.plan.add(input_of_layer(w, block, x, of_layers, layer, c.table_width, c.width), to=x)
        scale = w.tensors.optional_vector(f"{block}.layer_output_scale.weight", 1)
        if scale is not None:
            w.plan.scale(x, float(scale[0]))
    w.output_after_rmsnorm(x)
    if c.logit_cap:
        w.plan.soft_cap_logits(c.logit_cap)
    return w.finished()


def _rope_with_factors(w: PlanWriter, c: Config) -> Rope:
    """Return the RoPE of layers without a sliding window.

    Frequency factors are required, because the factors determine which features are not rotated.
    """
    w.tensors.vector("rope_freqs.weight", c.rope.dimensions // 2)
    return w.rope(Pairing.NEOX)


def _has_values(w: PlanWriter, block: str) -> bool:
    return any(f"{block}.{name}.weight" in w.tensors for name in ("attn_v", "attn_qkv"))


def _feed_forward(w: PlanWriter, block: str, x: Value, size: int, experts: Experts | None) -> Value:
    """Compute the feed-forward. In layers with experts, add the output of the experts."""
    h = w.rmsnorm(f"{block}.ffn_norm", x)
    y = w.linear(f"{block}.ffn_down", w.gated(block, h, Activation.GELU, size), x.width)
    if experts is None or f"{block}.ffn_gate_inp.weight" not in w.tensors:
        return y
    total = w.rmsnorm(f"{block}.post_ffw_norm_1", y)
    y = _combined_experts(w, block, x, experts)
    w.plan.add(w.rmsnorm(f"{block}.post_ffw_norm_2", y), to=total)
    return total


def _combined_experts(w: PlanWriter, block: str, x: Value, experts: Experts) -> Value:
    """Compute the output of the experts. The router normalizes its input separately."""
    scale = w.tensors.vector(f"{block}.ffn_gate_inp.scale", x.width) / np.float32(sqrt(x.width))
    logits = w.linear(f"{block}.ffn_gate_inp", w.plan.rmsnorm(x, scale, w.epsilon), experts.count)
    routing = w.plan.route(
        logits,
        experts.used,
        experts.gating,
        normalized=experts.normalized,
        expert_scales=w.tensors.optional_vector(f"{block}.ffn_down_exps.scale", experts.count),
        groups=experts.groups,
    )
    h = w.rmsnorm(f"{block}.pre_ffw_norm_2", x)
    return w.plan.combined(expert_outputs(w, block, h, experts, routing, Activation.GELU), routing)


ARCHITECTURE = Architecture(
    "gemma4", read_config, plan, models="Gemma 4", notes="sliding window, mixture of experts in 26B-A4B"
)
