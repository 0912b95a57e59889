"""The `ernie4_5-moe` architecture: like deepseek, but experts can have a selection bias.

Models: ERNIE 4.5 21B-A3B and 300B-A47B.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs import deepseek
from llmrun.model.archs.ernie4_5 import refuse_output_bias
from llmrun.model.archs.parts.architecture import Architecture
from llmrun.model.archs.parts.experts import MixtureConfig, expert_size, experts_of, leading_dense, shared_size
from llmrun.model.archs.parts.keys import MOST_LAYERS, Keys

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


def read_config(file: GGUFFile) -> MixtureConfig:
    """Read the config. Raises UnsupportedModel if dense layers follow layers with experts, as in no published model."""
    keys = Keys(file)
    refuse_output_bias(keys)
    key = "interleave_moe_layer_step"
    if (step := keys.integer(key, minimum=1, maximum=MOST_LAYERS)) > 1:
        raise keys.unsupported(f"a {keys.name(key)} of {step}")
    experts = experts_of(keys, expert_size(keys), normalized=True)
    return MixtureConfig.of(keys, experts=experts, dense=leading_dense(keys), shared=shared_size(keys, 0))


def plan(file: GGUFFile, config: MixtureConfig) -> Plan:
    return deepseek.plan(file, config)


ARCHITECTURE = Architecture(
    "ernie4_5-moe", read_config, plan, models="ERNIE 4.5 21B and 300B", notes="mixture of experts, one shared"
)
