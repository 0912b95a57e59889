"""The `nomic-bert` architecture: like bert, with RoPE instead of learned positions, and SwiGLU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import (
    LAYER_NORM_EPSILON,
    Architecture,
    Hyperparameters,
    PlanWriter,
    refuse_experts,
)
from llmrun.model.archs.parts.encoders import bert_embedding, bert_layers
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.plan.elementary import Pairing

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


def read_config(file: GGUFFile) -> Hyperparameters:
    keys = Keys(file)
    refuse_experts(keys)
    return Hyperparameters.of(keys, epsilon=LAYER_NORM_EPSILON, encoder=True)


def plan(file: GGUFFile, config: Hyperparameters) -> Plan:
    w = PlanWriter(file, config)
    x = bert_embedding(w, config, positions=False)
    w.plan.hidden = bert_layers(w, config, x, w.rope(Pairing.NEOX), w.swiglu)
    return w.finished()


ARCHITECTURE = Architecture("nomic-bert", read_config, plan, models="Nomic Embed 1 and 1.5", notes="embeddings")
