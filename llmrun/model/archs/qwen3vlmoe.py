"""The `qwen3vlmoe` architecture: like qwen3moe, with M-RoPE and deepstack."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs import qwen3moe
from llmrun.model.archs.parts.architecture import Architecture
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.archs.qwen3vl import deepstack_of

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


def read_config(file: GGUFFile) -> qwen3moe.Config:
    return qwen3moe.read_config(file).with_sections_of(Keys(file))


def plan(file: GGUFFile, config: qwen3moe.Config) -> Plan:
    return qwen3moe.plan(file, config, deepstack_of(Keys(file)))


ARCHITECTURE = Architecture("qwen3vlmoe", read_config, plan, models="Qwen3-VL 30B and 235B", notes="mixture of experts")
