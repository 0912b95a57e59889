"""The `internlm2` architecture, which is identical to llama without experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs import llama
from llmrun.model.archs.parts.architecture import Architecture, refuse_experts
from llmrun.model.archs.parts.keys import Keys

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


def read_config(file: GGUFFile) -> llama.Config:
    keys = Keys(file)
    refuse_experts(keys)
    return llama.Config.of(keys)


def plan(file: GGUFFile, config: llama.Config) -> Plan:
    return llama.plan(file, config)


ARCHITECTURE = Architecture("internlm2", read_config, plan, models="InternLM 2 and 2.5")
