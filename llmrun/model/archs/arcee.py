"""The `arcee` architecture: like llama, but the feed-forward has no gate, and its activation is the square of ReLU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import Architecture, Hyperparameters, PlanWriter, refuse_experts
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.plan.elementary import Pairing
from llmrun.model.plan.ops.activations import Activation

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


def read_config(file: GGUFFile) -> Hyperparameters:
    keys = Keys(file)
    refuse_experts(keys)
    return Hyperparameters.of(keys)


def plan(file: GGUFFile, config: Hyperparameters) -> Plan:
    w = PlanWriter(file, config)
    shape, rope = config.attention(), w.rope(Pairing.INTERLEAVED)
    x = w.embed()
    for layer in range(config.layers):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        q, k, v = w.queries_keys_values(block, h)
        w.linear_add(f"{block}.attn_output", w.plan.attention(q, k, v, shape, rope), to=x)
        h = w.rmsnorm(f"{block}.ffn_norm", x)
        up = w.linear(f"{block}.ffn_up", h, config.feed_forward)
        w.linear_add(f"{block}.ffn_down", w.plan.activate(up, Activation.RELU_SQUARED), to=x)
    w.output_after_rmsnorm(x)
    return w.finished()


ARCHITECTURE = Architecture("arcee", read_config, plan, models="AFM 4.5B", notes="no gate in the feed-forward")
