"""The `mistral3` architecture: llama's form, with YaRN of its own settings.

Ministral 3. Its queries are scaled from the original context (16,384 tokens) on; a plan cannot say that, so that a
context ends there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmrun.archs import llama
from llmrun.archs.hyperparameters import refuse_experts
from llmrun.archs.keys import Keys

if TYPE_CHECKING:
    from llmrun.gguf.reader import GGUFFile
    from llmrun.kernels.plan import Plan


@dataclass(frozen=True, slots=True)
class Config(llama.Config):
    temperature_scale: float = 0.0


def check(file: GGUFFile) -> Config:
    keys = Keys(file)
    refuse_experts(keys)
    config = Config.of(keys, temperature_scale=keys.number("attention.temperature_scale", 0.0))
    return replace(config, rope=config.rope.with_yarn_of(keys))


def plan(file: GGUFFile, config: Config) -> Plan:
    plan = llama.plan(file, config)
    if config.temperature_scale:
        plan.most_context = config.rope.original_context
    return plan
