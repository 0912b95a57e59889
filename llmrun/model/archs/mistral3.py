"""The `mistral3` architecture: like llama, with YaRN parameters from the file and queries scaled by their position.

Models: Ministral 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from llmrun.model.archs import llama
from llmrun.model.archs.parts.architecture import Architecture, refuse_experts
from llmrun.model.archs.parts.keys import Keys

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


def read_config(file: GGUFFile) -> llama.Config:
    keys = Keys(file)
    refuse_experts(keys)
    config = llama.Config.of(keys)
    if config.rope.dimensions != config.head_size:
        seen = f"must be {config.head_size}, the head size, not {config.rope.dimensions}"
        raise keys.bad("rope.dimension_count", seen)
    factor, rope = keys.factor("attention.temperature_scale", 0.0), config.rope.with_yarn_of(keys)
    return replace(config, rope=rope, growth=(factor, rope.original_context) if factor else None)


def plan(file: GGUFFile, config: llama.Config) -> Plan:
    return llama.plan(file, config)


ARCHITECTURE = Architecture("mistral3", read_config, plan, models="Ministral 3")
