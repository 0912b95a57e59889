"""The `dots1` architecture: like qwen3, but all layers except the first few have experts and a shared expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import Architecture, PlanWriter
from llmrun.model.archs.parts.experts import (
    MixtureConfig,
    add_feed_forward,
    expert_size,
    experts_of,
    gating_of,
    leading_dense,
    scale_of,
    shared_size_by_count,
)
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.plan.elementary import Pairing

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.ops.experts import Gating
    from llmrun.model.plan.plan import Plan


def read_config(file: GGUFFile) -> MixtureConfig:
    keys = Keys(file)
    return config_of(keys, shared=shared_size_by_count(keys))


def config_of(keys: Keys, *, shared: int, unused: int = 0, gating: Gating | None = None) -> MixtureConfig:
    """Read the hyperparameters that dots1, bailingmoe2 and glm4moe share. Raises BadGGUF and UnsupportedModel.

    If `gating` is None, the file must specify the gating function.
    """
    experts = experts_of(
        keys,
        expert_size(keys),
        normalized=keys.flag("expert_weights_norm", default=False),
        gating=gating_of(keys, gating),
        scale=scale_of(keys),
    )
    dense = leading_dense(keys)
    return MixtureConfig.of(keys, unused_layers=unused, experts=experts, dense=dense, shared=shared, unused=unused)


def plan(file: GGUFFile, config: MixtureConfig) -> Plan:
    c, w = config, PlanWriter(file, config)
    shape, rope = c.attention(), w.rope(Pairing.NEOX)
    x = w.embed()
    for layer in range(c.layers):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        q, k, v = w.queries_keys_values(block, h)
        q, k = w.headnorm(f"{block}.attn_q_norm", q), w.headnorm(f"{block}.attn_k_norm", k)
        w.linear_add(f"{block}.attn_output", w.plan.attention(q, k, v, shape, rope), to=x)
        h = w.rmsnorm(f"{block}.ffn_norm", x)
        add_feed_forward(w, block, h, None if layer < c.dense else c.experts, c.shared, to=x)
    w.output_after_rmsnorm(x)
    w.leave_out_layers(c.layers, c.unused)
    return w.finished()


ARCHITECTURE = Architecture("dots1", read_config, plan, models="dots.llm1", notes="mixture of experts, one shared")
