"""The `bailingmoe2` architecture: like dots1, but experts are chosen from the best groups.

Models: Ling 2.0 and Ring 2.0, mini, flash and 1T.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs import dots1
from llmrun.model.archs.parts.architecture import Architecture, layers_ahead
from llmrun.model.archs.parts.experts import MixtureConfig, expert_size, shared_count, shared_size
from llmrun.model.archs.parts.keys import Keys

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


def read_config(file: GGUFFile) -> MixtureConfig:
    keys = Keys(file)
    shared = shared_size(keys, expert_size(keys)) * shared_count(keys)
    return dots1.config_of(keys, shared=shared, unused=layers_ahead(keys))


def plan(file: GGUFFile, config: MixtureConfig) -> Plan:
    return dots1.plan(file, config)


ARCHITECTURE = Architecture(
    "bailingmoe2", read_config, plan, models="Ling 2.0, Ring 2.0", notes="mixture of experts in groups, one shared"
)
