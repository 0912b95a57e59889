"""The `mistral4` architecture: like deepseek2, with a different magnitude of YaRN."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs import deepseek2
from llmrun.model.archs.parts.architecture import Architecture
from llmrun.model.archs.parts.keys import Keys

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


def read_config(file: GGUFFile) -> deepseek2.Config:
    return deepseek2.config_of(Keys(file), has_equal_multipliers=False)


def plan(file: GGUFFile, config: deepseek2.Config) -> Plan:
    return deepseek2.plan(file, config)


ARCHITECTURE = Architecture(
    "mistral4",
    read_config,
    plan,
    models="Mistral Small 4",
    notes="latent attention, mixture of experts, one shared",
)
