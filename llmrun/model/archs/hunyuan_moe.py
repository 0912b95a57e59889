"""The `hunyuan-moe` architecture: like hunyuan-dense, with experts and a shared expert as the feed-forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.hunyuan_dense import add_attention
from llmrun.model.archs.parts.architecture import Architecture, Hyperparameters, PlanWriter, feed_forward_of
from llmrun.model.archs.parts.experts import Experts, add_feed_forward, experts_of, shared_size
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.plan.elementary import Pairing

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


class Config(Hyperparameters, frozen=True):
    """The hyperparameters of hunyuan-moe. `shared` is the number of features of the shared expert."""

    experts: Experts
    shared: int


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    size = feed_forward_of(keys)  # llama.cpp also requires the size of the experts in the file, but does not use it
    experts = experts_of(keys, size, normalized=True)
    return Config.of(keys, experts=experts, shared=shared_size(keys, size))


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    rope = w.rope(Pairing.NEOX)
    x = w.embed()
    for layer in range(c.layers):
        block = f"blk.{layer}"
        add_attention(w, block, c, rope, to=x)
        h = w.rmsnorm(f"{block}.ffn_norm", x)
        add_feed_forward(w, block, h, c.experts, c.shared, to=x)
    w.output_after_rmsnorm(x)
    return w.finished()


ARCHITECTURE = Architecture(
    "hunyuan-moe", read_config, plan, models="Hunyuan A13B", notes="mixture of experts, one shared"
)
