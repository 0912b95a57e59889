"""The `internlm2` architecture: llama's form under another name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.archs import llama
from llmrun.archs.hyperparameters import Hyperparameters

if TYPE_CHECKING:
    from llmrun.gguf.reader import GGUFFile
    from llmrun.kernels.plan import Plan


check = llama.check


def plan(file: GGUFFile, config: Hyperparameters) -> Plan:
    return llama.plan(file, config)
