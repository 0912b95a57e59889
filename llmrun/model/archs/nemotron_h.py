"""The `nemotron_h` architecture: each layer is Mamba-2, attention, or a feed-forward network without a gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import Architecture, PlanWriter, refuse_experts
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.archs.parts.nemotron_layers import NemotronConfig, add_layers, add_ungated

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan
    from llmrun.model.plan.twin import Value


def read_config(file: GGUFFile) -> NemotronConfig:
    keys = Keys(file)
    refuse_experts(keys)
    return NemotronConfig.read(keys)


def plan(file: GGUFFile, config: NemotronConfig) -> Plan:
    w = PlanWriter(file, config)
    add_layers(w, config, _add_feed_forward)
    return w.finished()


def _add_feed_forward(w: PlanWriter, block: str, h: Value, size: int, to: Value) -> None:
    add_ungated(w, f"{block}.ffn_up", f"{block}.ffn_down", h, size, to)


ARCHITECTURE = Architecture("nemotron_h", read_config, plan, models="Nemotron-H, Nemotron Nano 2", notes="Mamba-2")
