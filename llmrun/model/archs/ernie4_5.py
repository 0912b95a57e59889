"""The `ernie4_5` architecture, which is identical to llama without experts."""

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
    refuse_output_bias(keys)
    return llama.Config.of(keys)


def refuse_output_bias(keys: Keys) -> None:
    """Raise UnsupportedModel if the file contains a bias that llama.cpp loads but ignores."""
    if any(name.endswith(".attn_output.bias") for name in keys.file.tensors):
        raise keys.unsupported("a bias on the attention output")


def plan(file: GGUFFile, config: llama.Config) -> Plan:
    return llama.plan(file, config)


ARCHITECTURE = Architecture("ernie4_5", read_config, plan, models="ERNIE 4.5, dense")
