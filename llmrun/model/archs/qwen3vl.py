"""The `qwen3vl` architecture: like qwen3, with M-RoPE. Images are not supported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs import qwen3
from llmrun.model.archs.parts.architecture import Architecture
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.archs.parts.rope_settings import check_sections

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.archs.parts.architecture import Hyperparameters
    from llmrun.model.plan.plan import Plan


def read_config(file: GGUFFile) -> Hyperparameters:
    config = qwen3.read_config(file)
    check_sections(Keys(file), config.rope, config.head_size)
    return config


def plan(file: GGUFFile, config: Hyperparameters) -> Plan:
    return qwen3.plan(file, config)


ARCHITECTURE = Architecture("qwen3vl", read_config, plan, models="Qwen3-VL, dense, text")
