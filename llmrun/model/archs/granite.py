"""The `granite` architecture: like llama, with scales for embeddings, attention scores, residuals and logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import Architecture, Hyperparameters, PlanWriter, refuse_experts
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.plan.elementary import Pairing

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


class Config(Hyperparameters, frozen=True):
    """The hyperparameters of granite. If `attention_scale` is None, the scale is derived from the head size."""

    embedding_scale: float
    attention_scale: float | None
    residual_scale: float
    logit_scale: float
    has_rope: bool


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    refuse_experts(keys)
    if keys.has("deepstack_mapping"):
        raise keys.unsupported(f"images that are added in chosen layers ({keys.name('deepstack_mapping')})")
    return Config.of(
        keys,
        embedding_scale=keys.scale("embedding_scale", 1.0),
        attention_scale=keys.scale("attention.scale", 1.0) if keys.number("attention.scale", 0.0) else None,
        residual_scale=keys.scale("residual_scale", 1.0),
        logit_scale=keys.scale("logit_scale"),
        has_rope=keys.flag("rope.scaling.finetuned", default=True),
    )


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    shape, rope = c.attention(), w.rope(Pairing.INTERLEAVED)
    x = w.embed(scale=c.embedding_scale, image_scale=c.embedding_scale)
    for layer in range(c.layers):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        q, k, v = w.queries_keys_values(block, h)
        a = w.plan.attention(q, k, v, shape, rope if c.has_rope else None, scale=c.attention_scale)
        w.plan.add(w.linear(f"{block}.attn_output", a, c.width), to=x, scale=c.residual_scale)
        h = w.rmsnorm(f"{block}.ffn_norm", x)
        w.plan.add(w.linear(f"{block}.ffn_down", w.swiglu(block, h), c.width), to=x, scale=c.residual_scale)
    w.output_after_rmsnorm(x, scale=1 / c.logit_scale)
    return w.finished()


ARCHITECTURE = Architecture("granite", read_config, plan, models="Granite 3 and 4, dense")
