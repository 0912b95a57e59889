"""The `llama` architecture: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Also SmolLM2, TinyLlama, Mistral and what else was made in its form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.archs import blocks
from llmrun.archs.hyperparameters import Hyperparameters, refuse_experts
from llmrun.archs.keys import Keys
from llmrun.archs.tensors import Tensors
from llmrun.kernels.plan import Plan
from llmrun.kernels.rotations import Pairing

if TYPE_CHECKING:
    from llmrun.gguf.reader import GGUFFile


def check(file: GGUFFile) -> Hyperparameters:
    """The config. Raises BadGGUF and UnsupportedModel."""
    keys = Keys(file)
    refuse_experts(keys)
    return Hyperparameters.of(keys)


def plan(file: GGUFFile, config: Hyperparameters) -> Plan:
    """The model as a plan. Raises BadGGUF and UnsupportedModel for tensors that are not the config's."""
    c, t, p = config, Tensors(file), Plan()
    shape, rope = c.attention(), c.rope.rope_of(t, Pairing.ADJACENT)
    x = blocks.embedding(p, t, c)
    for layer in range(c.layers):
        block = f"blk.{layer}"
        h = p.rmsnorm(x, t.vector(f"{block}.attn_norm.weight", c.width), c.norm_epsilon)
        q, k, v = blocks.queries_keys_values(p, t, block, h, c)
        a = p.attention(q, k, v, shape, rope)
        blocks.linear_add(p, t, f"{block}.attn_output", a, to=x)
        h = p.rmsnorm(x, t.vector(f"{block}.ffn_norm.weight", c.width), c.norm_epsilon)
        blocks.linear_add(p, t, f"{block}.ffn_down", blocks.swiglu(p, t, block, h, c.feed_forward), to=x)
    blocks.output(p, t, p.rmsnorm_wanted(x, t.vector("output_norm.weight", c.width), c.norm_epsilon), c)
    t.finish()
    return p
