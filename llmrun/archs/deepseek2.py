"""The `deepseek2` architecture: keys and values of all heads are made of few features ("latent"), experts with shared
ones, positions apart from the rest.

DeepSeek V2 Lite, GLM-4.7-Flash, GigaChat 3, Kanana 2. Newer files have the matrix that makes keys and values as two
(attn_k_b, attn_v_b): queries times the first are compared with the latent features themselves, so that all heads share
one, and the cache is small. Older files have it as it was trained (attn_kv_b): keys and values of every head are made.

A head's features that are rotated by position come first here; in the file they are last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log, sqrt
from typing import TYPE_CHECKING

from llmrun.archs.parts.experts import (
    Experts,
    add_experts,
    expert_size,
    experts_of,
    gating_of,
    has_experts,
    leading_dense,
    scale_of,
    shared_expert,
    shared_size_by_count,
)
from llmrun.archs.parts.hyperparameters import MOST_WIDTH, Hyperparameters, layers_ahead
from llmrun.archs.parts.keys import VECTOR, Keys
from llmrun.archs.parts.writer import PlanWriter
from llmrun.plan.kv_shapes import AttentionShape
from llmrun.plan.ops.experts import Gating
from llmrun.plan.rope import Pairing

if TYPE_CHECKING:
    from llmrun.archs.parts.rope_settings import RopeSettings
    from llmrun.gguf.reader import GGUFFile
    from llmrun.plan.plan import Plan
    from llmrun.plan.rope import Rope
    from llmrun.plan.values import Value

# GLM-4.7-Flash, by its layers (with or without one that looks ahead) and its vocabulary: files of it are older than the
# key that says how its experts are weighed.
_LAYERS_OF_GLM, _VOCABULARY_OF_GLM = (47, 48), 154880
_MOST_MULTIPLIER = 10.0  # of YaRN; in real models at most 1
_MOST_SCALE = 1e9


@dataclass(frozen=True, slots=True)
class Config(Hyperparameters):
    """Attention over latent keys and values: `rope.dimensions` features of a head are rotated, the others `plain`.

    absorbed      keys and values are the latent features themselves
    latent        features that keys and values of all heads are made of
    query_latent  the same of queries; 0: they are made of the whole row
    value_size    features of a head's values
    scale         of attention
    unused        layers at the end that predict tokens further ahead
    experts       None: all layers are dense
    dense         layers before the first with experts
    shared        features of the expert that every row is sent to
    """

    absorbed: bool
    latent: int
    query_latent: int
    value_size: int
    scale: float
    unused: int
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
    keys = Keys(file)
    if keys.number("attention.temperature_scale", 0.0):
        raise keys.unsupported("queries that grow with their position")
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
    rope = _with_own_magnitude(config.rope, multiplier)
    scale = _attention_scale(keys, rope, multiplier, head_size)
    return _with_experts(keys, replace(config, rope=rope, scale=scale))


def _check_heads(keys: Keys, c: Config) -> None:
    """What the file says of heads must be what it has: the cache is laid out by it."""
    if c.plain <= 0 or c.plain % VECTOR:
        raise keys.unsupported(f"heads of {c.head_size} features of which {c.rotated} are rotated")
    kept = c.shape
    seen = {"head_count_kv": c.kv_heads}
    for kind in ("key", "value"):
        seen[f"{kind}_length"] = keys.integer(f"attention.{kind}_length", minimum=1, maximum=MOST_WIDTH)
    wanted = {"head_count_kv": kept.kv_heads, "key_length": kept.head_size, "value_length": kept.value_size}
    for key, size in wanted.items():
        if seen[key] != size:
            raise keys.bad(f"attention.{key}", f"{seen[key]} seen, must be {size}")


def _yarn_multiplier(keys: Keys) -> float:
    """mscale_all_dim of the model's config, a tenth of which is in files. 0: there is none."""
    key = "rope.scaling.yarn_log_multiplier"
    multiplier = 10 * keys.number(key, 0.0)
    if not 0 <= multiplier <= _MOST_MULTIPLIER:
        raise keys.bad(key, f"{multiplier / 10:g} seen, must be 0 to {_MOST_MULTIPLIER / 10:g}")
    return multiplier


def _with_own_magnitude(rope: RopeSettings, multiplier: float) -> RopeSettings:
    """With a multiplier rotated features keep their size: scores get YaRN's magnitude as a whole, twice."""
    if rope.yarn is None:
        return rope
    return replace(rope, yarn=replace(rope.yarn, log_multiplier=1.0 if multiplier else 0.0))


def _attention_scale(keys: Keys, rope: RopeSettings, multiplier: float, head_size: int) -> float:
    """As llama.cpp has it: also where positions are scaled without YaRN, and where there is no multiplier."""
    spread = log(rope.factor)
    magnitude = rope.magnitude_with_yarn if rope.yarn is not None else rope.magnitude * (1 + 0.1 * spread)
    scale = (magnitude * (1 + 0.1 * multiplier * spread)) ** 2 / sqrt(head_size)
    if not 1 / _MOST_SCALE <= scale <= _MOST_SCALE:
        raise keys.bad("rope.scaling.factor", f"{rope.factor:g} seen, which makes an attention scale of {scale:g}")
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
    if keys.integer("expert_gating_func", 0, minimum=0, maximum=255):
        return gating_of(keys)
    vocabulary = keys.integer("vocab_size", config.vocabulary_size, minimum=0, maximum=MOST_WIDTH)
    is_glm = config.layers in _LAYERS_OF_GLM and vocabulary == _VOCABULARY_OF_GLM
    return Gating.SIGMOID if is_glm else Gating.SOFTMAX


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    rope = c.rope.rope(file, Pairing.INTERLEAVED)
    x = w.embed()
    for layer in range(c.layers):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        a = _absorbed_attention(w, block, h, c, rope) if c.absorbed else _full_attention(w, block, h, c, rope)
        w.linear_add(f"{block}.attn_output", a, to=x)
        h = w.rmsnorm(f"{block}.ffn_norm", x)
        if layer < c.dense or c.experts is None:
            w.linear_add(f"{block}.ffn_down", w.swiglu(block, h), to=x)
        else:
            w.plan.add(shared_expert(w, block, h, c.shared, c.width), to=x)
            add_experts(w, block, h, c.experts, to=x)
    w.output_after_rmsnorm(x)
    for layer in range(c.layers, c.layers + c.unused):
        w.tensors.leave_out(f"blk.{layer}.")
    return w.finished()


def _absorbed_attention(w: PlanWriter, block: str, h: Value, c: Config, rope: Rope) -> Value:
    """Values are the latent features that keys have too; heads make their own of what they have found."""
    plain, rotated = _queries(w, block, h, c)
    q = w.plan.concat(rotated, w.head_linear(f"{block}.attn_k_b", plain, c.latent, c.heads), c.heads)
    latent, rotated = _latent(w, block, h, c)
    k = w.plan.concat(rotated, latent, 1)
    a = w.plan.attention(q, k, latent, c.shape, rope, scale=c.scale)
    return w.head_linear(f"{block}.attn_v_b", a, c.value_size, c.heads)


def _full_attention(w: PlanWriter, block: str, h: Value, c: Config, rope: Rope) -> Value:
    """Broadcast the rotated part of a key, which all heads share."""
    plain, rotated = _queries(w, block, h, c)
    q = w.plan.concat(rotated, plain, c.heads)
    latent, rotated = _latent(w, block, h, c)
    both = w.linear(f"{block}.attn_kv_b", latent, c.heads * (c.plain + c.value_size))
    k = w.plan.concat_to_each(rotated, w.plan.slice(both, 0, c.plain, c.heads), c.heads)
    v = w.plan.slice(both, c.plain, c.value_size, c.heads)
    return w.plan.attention(q, k, v, c.shape, rope, scale=c.scale)


def _queries(w: PlanWriter, block: str, h: Value, c: Config) -> tuple[Value, Value]:
    """(what is plain of each head, what is to be rotated)"""
    if c.query_latent:
        latent = w.rmsnorm(f"{block}.attn_q_a_norm", w.linear(f"{block}.attn_q_a", h, c.query_latent))
        q = w.linear(f"{block}.attn_q_b", latent, c.heads * c.head_size)
    else:
        q = w.linear(f"{block}.attn_q", h, c.heads * c.head_size)
    return w.plan.slice(q, 0, c.plain, c.heads), w.plan.slice(q, c.plain, c.rotated, c.heads)


def _latent(w: PlanWriter, block: str, h: Value, c: Config) -> tuple[Value, Value]:
    """(what keys and values are made of, what is to be rotated of keys)"""
    both = w.linear(f"{block}.attn_kv_a_mqa", h, c.latent + c.rotated)
    latent = w.rmsnorm(f"{block}.attn_kv_a_norm", w.plan.slice(both, 0, c.latent))
    return latent, w.plan.slice(both, c.latent, c.rotated)
