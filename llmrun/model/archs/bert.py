"""The `bert` architecture: an encoder with learned positions and norms after each block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import (
    LAYER_NORM_EPSILON,
    Architecture,
    Hyperparameters,
    PlanWriter,
    refuse_experts,
)
from llmrun.model.archs.parts.encoders import bert_embedding, bert_layers, classified, ungated
from llmrun.model.archs.parts.keys import Keys

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


def read_config(file: GGUFFile) -> Hyperparameters:
    keys = Keys(file)
    refuse_experts(keys)
    return Hyperparameters.of(keys, epsilon=LAYER_NORM_EPSILON, encoder=True)


def plan(file: GGUFFile, config: Hyperparameters) -> Plan:
    w = PlanWriter(file, config)
    x = bert_embedding(w, config, positions=True)
    x = bert_layers(w, config, x, None, ungated(w, config))
    w.plan.hidden = classified(w, x)
    return w.finished()


ARCHITECTURE = Architecture(
    "bert", read_config, plan, models="BGE 1.5 and M3, E5, GTE, MiniLM, Arctic Embed", notes="embeddings"
)
