"""The `deepseek2` architecture: multi-head latent attention (MLA), and experts with shared experts.

In MLA, the keys and values of all heads are computed from a few latent features.

Models: DeepSeek V2 Lite, V3 and R1, Kimi K2, GLM-4.7-Flash, GigaChat 3, Kanana 2 and Mistral Large 3.

Newer files split the matrix that computes keys and values into two matrices (attn_k_b, attn_v_b). Queries are
multiplied by the first matrix and compared directly with the latent features, so all heads share one KV head and the
cache is small. With the original matrix (attn_kv_b) of older files, the keys and values of every head are computed.

The rotated features of a head come first in this module, but last in the file.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from llmrun.model.archs.parts import draft_head
from llmrun.model.archs.parts.architecture import (
    MOST_CONTEXT,
    MOST_WIDTH,
    Architecture,
    Hyperparameters,
    PlanWriter,
    layers_ahead,
)
from llmrun.model.archs.parts.experts import (
    Experts,
    add_feed_forward,
    expert_size,
    experts_of,
    gating_of,
    has_experts,
    leading_dense,
    scale_of,
    shared_size_by_count,
)
from llmrun.model.archs.parts.keys import VECTOR, Keys
from llmrun.model.plan.elementary import Pairing, Rope, log
from llmrun.model.plan.ops.experts import Gating
from llmrun.model.plan.shapes import AttentionShape

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.archs.parts.rope_settings import RopeSettings
    from llmrun.model.plan.plan import Plan
    from llmrun.model.plan.twin import Value

# GLM-4.7-Flash is recognized by the vocabulary size and the number of layers (with or without the layer for multi-token
# prediction), because the model's files are older than the metadata key for the gating function.
_LAYERS_OF_GLM, _VOCABULARY_OF_GLM = (47, 48), 154880
_MOST_MULTIPLIER = 10.0  # limit for YaRN; the multiplier of real models is at most 1
_MOST_SCALE = 1e9


class Config(Hyperparameters, frozen=True):
    """The hyperparameters of deepseek2.

    In each head, RoPE rotates `rope.dimensions` features. The remaining features are called `plain`.

    absorbed      True if the latent features themselves are used as keys and values
    latent        number of latent features for the keys and values of all heads
    query_latent  number of latent features for queries; 0 if queries are computed from the whole row
    value_size    number of features of each value head
    scale         factor applied to the attention scores
    growth        a Rope that scales queries by their position and rotates by no angle, or None
    unused        number of unused layers at the end, which are for multi-token prediction
    experts       None if all layers are dense
    dense         number of layers before the first layer with experts
    shared        number of features of the shared expert
    """

    absorbed: bool
    latent: int
    query_latent: int
    value_size: int
    scale: float
    unused: int
    growth: Rope | None = None
    experts: Experts | None = None
    dense: int = 0
    shared: int = 0

    @property
    def rotated(self) -> int:
        return self.rope.dimensions

    @property
    def plain(self) -> int:
        return self.head_size - self.rotated

    @property
    def shape(self) -> AttentionShape:
        if self.absorbed:
            return AttentionShape(self.heads, 1, self.rotated + self.latent, value_size=self.latent)
        return AttentionShape(self.heads, self.heads, self.head_size, value_size=self.value_size)


def read_config(file: GGUFFile) -> Config:
    return config_of(Keys(file), has_equal_multipliers=True)


def config_of(keys: Keys, *, has_equal_multipliers: bool) -> Config:
    """Read the hyperparameters that deepseek2 and mistral4 share. Raises BadGGUF and UnsupportedModel.

    If `has_equal_multipliers`, the multiplier of YaRN's magnitude (mscale) equals the multiplier of the attention scale
    (mscale_all_dim), as in all models of deepseek2. Otherwise, the multiplier of the magnitude is 1.
    """
    absorbed = keys.has("attention.key_length_mla")
    part = "_mla" if absorbed else ""
    head_size, value_size = (
        keys.features(f"attention.{kind}_length{part}", minimum=1, maximum=MOST_WIDTH) for kind in ("key", "value")
    )
    unused = layers_ahead(keys)
    config = Config.of(
        keys,
        head_size=head_size,
        unused_layers=unused,
        absorbed=absorbed,
        latent=keys.features("attention.kv_lora_rank", minimum=1, maximum=MOST_WIDTH),
        query_latent=keys.features("attention.q_lora_rank", 0, minimum=0, maximum=MOST_WIDTH),
        value_size=value_size,
        scale=1.0,
        unused=unused,
    )
    _check_heads(keys, config)
    multiplier = _yarn_multiplier(keys)
    rope = _with_own_magnitude(config.rope, 1.0 if multiplier and has_equal_multipliers else multiplier)
    scale = _attention_scale(keys, rope, multiplier, head_size)
    growth = _growth(keys, config.shape.head_size)
    return _with_experts(keys, replace(config, rope=rope, scale=scale, growth=growth))


def _check_heads(keys: Keys, c: Config) -> None:
    """Check that the head counts and sizes in the file are consistent, because they determine the cache layout."""
    if c.plain <= 0 or c.plain % VECTOR:
        raise keys.unsupported(f"heads of {c.head_size} features with {c.rotated} rotated features")
    kept = c.shape
    seen = {"head_count_kv": c.kv_heads}
    for kind in ("key", "value"):
        seen[f"{kind}_length"] = keys.integer(f"attention.{kind}_length", minimum=1, maximum=MOST_WIDTH)
    wanted = {"head_count_kv": kept.kv_heads, "key_length": kept.head_size, "value_length": kept.value_size}
    for key, size in wanted.items():
        if seen[key] != size:
            raise keys.bad(f"attention.{key}", f"must be {size}, not {seen[key]}")


def _yarn_multiplier(keys: Keys) -> float:
    """Return mscale_all_dim from the model's config, or 0 if it is missing. GGUF files store a tenth of the value."""
    key = "rope.scaling.yarn_log_multiplier"
    multiplier = 10 * keys.number(key, 0.0)
    if not 0 <= multiplier <= _MOST_MULTIPLIER:
        raise keys.bad(key, f"must be 0 to {_MOST_MULTIPLIER / 10:g}, not {multiplier / 10:g}")
    return multiplier


def _with_own_magnitude(rope: RopeSettings, divisor: float) -> RopeSettings:
    """Divide YaRN's magnitude of the rotated features by the magnitude for `divisor`, unless `divisor` is 0.

    The attention scale then includes the magnitude for `divisor`.
    """
    return rope if rope.yarn is None else replace(rope, yarn=replace(rope.yarn, log_multiplier=divisor))


def _growth(keys: Keys, features: int) -> Rope | None:
    factor = keys.factor("attention.temperature_scale", 0.0)
    if not factor:
        return None
    tokens = keys.integer("attention.temperature_length", minimum=1, maximum=MOST_CONTEXT)
    return Rope(np.zeros(features // 2), growth=(factor, tokens))


def _attention_scale(keys: Keys, rope: RopeSettings, multiplier: float, head_size: int) -> float:
    """Compute the attention scale in the same way as llama.cpp, even for models without YaRN or a multiplier."""
    spread = log(rope.factor)
    magnitude = rope.magnitude_with_yarn if rope.yarn is not None else rope.magnitude * (1 + 0.1 * spread)
    twice = magnitude * (1 + 0.1 * multiplier * spread)  # the magnitude applies to queries and to keys
    scale = twice * twice / sqrt(head_size)
    if not 1 / _MOST_SCALE <= scale <= _MOST_SCALE:
        raise keys.bad("rope.scaling.factor", f"{rope.factor:g} gives an attention scale of {scale:g}")
    return scale


def _with_experts(keys: Keys, config: Config) -> Config:
    dense = leading_dense(keys)
    if not has_experts(keys) or dense >= config.layers:
        return replace(config, dense=config.layers)
    experts = experts_of(
        keys,
        expert_size(keys),
        normalized=keys.flag("expert_weights_norm", default=False),
        gating=_gating(keys, config),
        scale=scale_of(keys),
    )
    return replace(config, experts=experts, dense=dense, shared=shared_size_by_count(keys))


def _gating(keys: Keys, config: Config) -> Gating:
    vocabulary = keys.integer("vocab_size", config.vocabulary_size, minimum=0, maximum=MOST_WIDTH)
    is_glm = config.layers in _LAYERS_OF_GLM and vocabulary == _VOCABULARY_OF_GLM
    return gating_of(keys, Gating.SIGMOID if is_glm else Gating.SOFTMAX)


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    rope = c.rope.rope(file, Pairing.INTERLEAVED)
    x = w.embed()
    for layer in range(c.layers):
        _add_layer(w, f"blk.{layer}", c, rope, None if layer < c.dense else c.experts, to=x)
    w.output_after_rmsnorm(x)
    w.leave_out_layers(c.layers, c.unused)
    return w.finished()


def draft_plan(file: GGUFFile, config: Config) -> Plan | None:
    def add_layer(w: PlanWriter, block: str, x: Value) -> None:
        _add_layer(w, block, config, config.rope.rope(file, Pairing.INTERLEAVED), config.experts, to=x)

    return draft_head.draft_plan(file, config, config.unused, add_layer)


def _add_layer(w: PlanWriter, block: str, c: Config, rope: Rope, experts: Experts | None, to: Value) -> None:
    """Add a layer. The layer's feed-forward is dense if `experts` is None."""
    h = w.rmsnorm(f"{block}.attn_norm", to)
    a = _absorbed_attention(w, block, h, c, rope) if c.absorbed else _full_attention(w, block, h, c, rope)
    w.linear_add(f"{block}.attn_output", a, to=to)
    h = w.rmsnorm(f"{block}.ffn_norm", to)
    add_feed_forward(w, block, h, experts, c.shared, to=to)


def _absorbed_attention(w: PlanWriter, block: str, h: Value, c: Config, rope: Rope) -> Value:
    """Compute attention with the latent features as values. Each head projects its result with its own matrix."""
    plain, rotated = _queries(w, block, h, c)
    q = _grown(w, c, w.plan.concat(rotated, w.head_linear(f"{block}.attn_k_b", plain, c.latent, c.heads), c.heads))
    latent, rotated = _latent(w, block, h, c)
    k = w.plan.concat(rotated, latent, 1)
    a = w.plan.attention(q, k, latent, c.shape, rope, scale=c.scale)
    return w.head_linear(f"{block}.attn_v_b", a, c.value_size, c.heads)


def _full_attention(w: PlanWriter, block: str, h: Value, c: Config, rope: Rope) -> Value:
    """Compute attention with separate keys and values for every head.

    The rotated part of the key is broadcast to all heads.
    """
    plain, rotated = _queries(w, block, h, c)
    q = _grown(w, c, w.plan.concat(rotated, plain, c.heads))
    latent, rotated = _latent(w, block, h, c)
    both = w.linear(f"{block}.attn_kv_b", latent, c.heads * (c.plain + c.value_size))
    k = w.plan.concat_to_each(rotated, w.plan.slice(both, 0, c.plain, c.heads), c.heads)
    v = w.plan.slice(both, c.plain, c.value_size, c.heads)
    return w.plan.attention(q, k, v, c.shape, rope, scale=c.scale)


def _queries(w: PlanWriter, block: str, h: Value, c: Config) -> tuple[Value, Value]:
    """Return (plain, rotated): the features of each head that RoPE leaves unchanged, and the rotated features."""
    if c.query_latent:
        latent = w.rmsnorm(f"{block}.attn_q_a_norm", w.linear(f"{block}.attn_q_a", h, c.query_latent))
        q = w.linear(f"{block}.attn_q_b", latent, c.heads * c.head_size)
    else:
        q = w.linear(f"{block}.attn_q", h, c.heads * c.head_size)
    return w.plan.slice(q, 0, c.plain, c.heads), w.plan.slice(q, c.plain, c.rotated, c.heads)


def _grown(w: PlanWriter, c: Config, q: Value) -> Value:
    return q if c.growth is None else w.plan.rotated(q, c.shape.head_size, c.growth)


def _latent(w: PlanWriter, block: str, h: Value, c: Config) -> tuple[Value, Value]:
    """Return (latent, rotated): the latent features for keys and values, and the key features that RoPE rotates."""
    both = w.linear(f"{block}.attn_kv_a_mqa", h, c.latent + c.rotated)
    latent = w.rmsnorm(f"{block}.attn_kv_a_norm", w.plan.slice(both, 0, c.latent))
    return latent, w.plan.slice(both, c.latent, c.rotated)


ARCHITECTURE = Architecture(
    "deepseek2",
    read_config,
    plan,
    models="DeepSeek V2 Lite, V3 and R1, Kimi K2, GLM-4.7-Flash, GigaChat 3, Kanana 2, Mistral Large 3",
    notes="latent attention, mixture of experts, one shared",
    draft_plan=draft_plan,
)
