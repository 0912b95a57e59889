"""The `apertus` architecture: like qwen3, but the feed-forward has no gate, and its activation is xIELU.

The parameters of the activation differ from layer to layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.architecture import Architecture, Hyperparameters, PlanWriter, layers_of, refuse_experts
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.plan.elementary import Pairing, softplus
from llmrun.model.plan.ops.activations import XieluCurve

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


class Config(Hyperparameters, frozen=True):
    """The hyperparameters of apertus. `curves` contains the parameters of each layer's activation."""

    curves: tuple[XieluCurve, ...]


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    refuse_experts(keys)
    return Config.of(keys, curves=_curves(file, layers_of(keys)))


def _curves(file: GGUFFile, layers: int) -> tuple[XieluCurve, ...]:
    """Read the parameters of xIELU. Files store both alphas before the softplus, which makes the alphas positive."""
    keys = Keys(file, "xielu")  # the names of these keys do not begin with the architecture
    stored = (keys.factors(name, layers) for name in ("alpha_p", "alpha_n", "beta", "eps"))
    return tuple(
        XieluCurve(softplus(positive), beta + softplus(negative), beta, least)
        for positive, negative, beta, least in zip(*stored, strict=True)
    )


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    shape, rope = c.attention(), w.rope(Pairing.NEOX)
    x = w.embed()
    for layer, curve in enumerate(c.curves):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        q, k, v = w.queries_keys_values(block, h)
        q, k = w.headnorm(f"{block}.attn_q_norm", q), w.headnorm(f"{block}.attn_k_norm", k)
        w.linear_add(f"{block}.attn_output", w.plan.attention(q, k, v, shape, rope), to=x)
        h = w.rmsnorm(f"{block}.ffn_norm", x)
        up = w.linear(f"{block}.ffn_up", h, c.feed_forward)
        w.linear_add(f"{block}.ffn_down", w.plan.xielu(up, curve), to=x)
    w.output_after_rmsnorm(x)
    return w.finished()


ARCHITECTURE = Architecture("apertus", read_config, plan, models="Apertus", notes="no gate in the feed-forward, xIELU")
