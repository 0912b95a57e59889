"""The `minimax-m2` architecture: like olmoe, but with a sigmoid as the gating function, and RoPE on part of each head.

Models: MiniMax-M2, M2.1, M2.5 and M2.7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs import olmoe
from llmrun.model.archs.parts.architecture import Architecture, feed_forward_of
from llmrun.model.archs.parts.experts import experts_of, gating_of
from llmrun.model.archs.parts.keys import Keys

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


def read_config(file: GGUFFile) -> olmoe.Config:
    keys = Keys(file)
    experts = experts_of(keys, feed_forward_of(keys), normalized=True, gating=gating_of(keys))
    return olmoe.Config.of(keys, experts=experts)


def plan(file: GGUFFile, config: olmoe.Config) -> Plan:
    return olmoe.plan(file, config)


ARCHITECTURE = Architecture("minimax-m2", read_config, plan, models="MiniMax-M2 to M2.7", notes="mixture of experts")
