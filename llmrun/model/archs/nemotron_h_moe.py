"""The `nemotron_h_moe` architecture: like nemotron_h, but with a mixture of experts and a shared expert.

In some models, the experts have fewer input and output features than the layers (`moe_latent_size`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import MOST_WIDTH, Architecture, PlanWriter
from llmrun.model.archs.parts.experts import (
    Experts,
    expert_size,
    experts_of,
    routing_of,
    scale_of,
    shared_size,
    ungated_expert_outputs,
)
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.archs.parts.nemotron_layers import NemotronConfig, add_layers, add_ungated
from llmrun.model.plan.ops.activations import Activation
from llmrun.model.plan.ops.experts import Gating

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan
    from llmrun.model.plan.twin import Value


class Config(NemotronConfig, frozen=True):
    """The hyperparameters of nemotron_h_moe.

    latent  number of input and output features of the experts; 0 if it equals the number of the layers' features
    shared  number of features of the shared expert
    """

    experts: Experts
    latent: int
    shared: int


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    experts = experts_of(
        keys,
        expert_size(keys),
        normalized=keys.flag("expert_weights_norm", default=False),
        gating=Gating.SIGMOID,
        scale=scale_of(keys),
    )
    latent = keys.integer("moe_latent_size", 0, minimum=0, maximum=MOST_WIDTH)
    return Config.read(keys, experts=experts, latent=latent, shared=shared_size(keys, 0))


def plan(file: GGUFFile, config: Config) -> Plan:
    w = PlanWriter(file, config)
    add_layers(w, config, partial(_add_experts, config))
    return w.finished()


def _add_experts(c: Config, w: PlanWriter, block: str, h: Value, size: int, to: Value) -> None:
    """Add the outputs of the experts and of the shared expert to `to`. The router reads h, not the latent features."""
    add_ungated(w, f"{block}.ffn_up_shexp", f"{block}.ffn_down_shexp", h, c.shared, to)
    routing = routing_of(w, block, h, c.experts)
    if not c.latent:
        w.plan.combine(ungated_expert_outputs(w, block, h, c.experts, routing, Activation.RELU_SQUARED), routing, to)
        return
    latent = w.linear(f"{block}.ffn_latent_down", h, c.latent)
    y = ungated_expert_outputs(w, block, latent, c.experts, routing, Activation.RELU_SQUARED)
    w.linear_add(f"{block}.ffn_latent_up", w.plan.combined(y, routing), to=to)


ARCHITECTURE = Architecture(
    "nemotron_h_moe",
    read_config,
    plan,
    models="Nemotron 3 Nano and Super",
    notes="Mamba-2, mixture of experts, one shared",
)
