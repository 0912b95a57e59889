"""The `falcon-h1` architecture: in each layer, attention and Mamba-2 run in parallel on the same input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import Architecture, Hyperparameters, PlanWriter, refuse_experts
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.archs.parts.recurrent_layers import RecurrentSizes, mamba, recurrent_sizes_of
from llmrun.model.plan.elementary import Pairing

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


class Config(Hyperparameters, frozen=True):
    sizes: RecurrentSizes


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    refuse_experts(keys)
    return Config.of(keys, sizes=recurrent_sizes_of(keys))


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    shape, rope = c.attention(), c.rope.rope(file, Pairing.NEOX)
    x = w.embed()
    for layer in range(c.layers):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        q, k, v = w.queries_keys_values(block, h)
        w.linear_add(f"{block}.attn_output", w.plan.attention(q, k, v, shape, rope), to=x)
        w.linear_add(f"{block}.ssm_out", mamba(w, block, h, c.sizes), to=x)
        h = w.plan.rmsnorm(x, w.tensors.vector(f"{block}.ffn_norm", c.width), w.epsilon)  # this name lacks `.weight`
        w.linear_add(f"{block}.ffn_down", w.swiglu(block, h), to=x)
    w.output_after_rmsnorm(x)
    return w.finished()


ARCHITECTURE = Architecture("falcon-h1", read_config, plan, models="Falcon-H1", notes="Mamba-2")
