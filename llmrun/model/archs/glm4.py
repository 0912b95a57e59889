"""The `glm4` architecture: norms before and after attention and feed-forward, one matrix for gate and up, and RoPE on
part of each head.

Models that also read images have M-RoPE, and their files pair the features of a head as in NeoX RoPE.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import (
    Architecture,
    Hyperparameters,
    PlanWriter,
    layers_ahead,
    refuse_experts,
)
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.plan.elementary import Pairing

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


class Config(Hyperparameters, frozen=True):
    """The hyperparameters of glm4.

    unused  number of unused layers at the end, which are for multi-token prediction
    """

    pairing: Pairing
    unused: int


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    refuse_experts(keys)
    unused, has_sections = layers_ahead(keys), keys.has("rope.dimension_sections")
    pairing = Pairing.NEOX if has_sections else Pairing.INTERLEAVED
    config = Config.of(keys, unused_layers=unused, unused=unused, pairing=pairing)
    if has_sections:
        return config.with_sections_of(keys, interleaved=False)
    return config


def plan(file: GGUFFile, config: Config) -> Plan:
    w = PlanWriter(file, config)
    shape, rope = config.attention(), w.rope(config.pairing)
    x = w.embed()
    for layer in range(config.layers):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        q, k, v = w.queries_keys_values(block, h)
        y = w.linear(f"{block}.attn_output", w.plan.attention(q, k, v, shape, rope), config.width)
        w.plan.add(w.rmsnorm(f"{block}.post_attention_norm", y), to=x)
        h = w.rmsnorm(f"{block}.ffn_norm", x)
        y = w.linear(f"{block}.ffn_down", w.fused_swiglu(block, h), config.width)
        w.plan.add(w.rmsnorm(f"{block}.post_ffw_norm", y), to=x)
    w.output_after_rmsnorm(x)
    w.leave_out_layers(config.layers, config.unused)
    return w.finished()


ARCHITECTURE = Architecture(
    "glm4", read_config, plan, models="GLM-4 0414, 9B and 32B; GLM-4.1V, GLM-4.6V-Flash and GLM-OCR, text"
)
