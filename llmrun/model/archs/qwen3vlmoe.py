"""The `qwen3vlmoe` architecture: like qwen3moe, with M-RoPE. Images are not supported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs import qwen3moe
from llmrun.model.archs.parts.architecture import Architecture
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.archs.parts.rope_settings import check_sections

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


def read_config(file: GGUFFile) -> qwen3moe.Config:
    config = qwen3moe.read_config(file)
    check_sections(Keys(file), config.rope, config.head_size)
    return config


def plan(file: GGUFFile, config: qwen3moe.Config) -> Plan:
    return qwen3moe.plan(file, config)


ARCHITECTURE = Architecture(
    "qwen3vlmoe", read_config, plan, models="Qwen3-VL 30B and 235B, text", notes="mixture of experts"
)
