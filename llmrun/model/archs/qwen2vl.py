"""The `qwen2vl` architecture: like qwen2, with M-RoPE.

Models: Qwen2-VL and Qwen2.5-VL, and Qwen2.5-Omni.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs import qwen2
from llmrun.model.archs.parts.architecture import Architecture
from llmrun.model.archs.parts.keys import Keys

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.archs.parts.architecture import Hyperparameters
    from llmrun.model.plan.plan import Plan


def read_config(file: GGUFFile) -> Hyperparameters:
    return qwen2.read_config(file).with_sections_of(Keys(file), interleaved=False)


def plan(file: GGUFFile, config: Hyperparameters) -> Plan:
    return qwen2.plan(file, config)


ARCHITECTURE = Architecture("qwen2vl", read_config, plan, models="Qwen2-VL, Qwen2.5-VL; Qwen2.5-Omni, text")
