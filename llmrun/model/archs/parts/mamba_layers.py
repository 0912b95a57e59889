"""Functions for Mamba-2 layers. They read the hyperparameters and add the ops to a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.recurrent_sizes import RecurrentSizes
from llmrun.model.plan.ops.activations import Activation

if TYPE_CHECKING:
    from llmrun.model.archs.parts.writer import PlanWriter
    from llmrun.model.plan.values import Value


def mamba(w: PlanWriter, block: str, h: Value, sizes: RecurrentSizes) -> Value:
    """Compute a Mamba-2 layer for h, up to its output matrix (`ssm_out`). Raises BadGGUF and UnsupportedModel.

    The input matrix (`ssm_in`) has the rows of z (the gate of the output), of x, B and C (which are convolved), and of
    dt (which determines the decay). x, B and C are the values, keys and queries of the recurrence.
    """
    s, plan = sizes, w.plan
    matrix = w.tensors.matrix(f"{block}.ssm_in.weight", h.width, s.values + s.convolved + s.heads)
    z = plan.linear(h, matrix.part(0, s.values))
    xbc = plan.linear(h, matrix.part(s.values, s.convolved))
    dt = plan.linear(h, matrix.part(s.values + s.convolved, s.heads))
    weight = w.tensors.vector(f"{block}.ssm_conv1d.weight", s.taps, s.convolved).reshape(s.convolved, s.taps)
    bias = w.tensors.optional_vector(f"{block}.ssm_conv1d.bias", s.convolved)
    x, b, c = plan.causal_convolution(xbc, weight, bias, (s.values, s.keys, s.keys))
    y = plan.ssd(
        *(x, b, c, dt),
        rate=w.tensors.vector(f"{block}.ssm_a", 1, s.heads),
        bias=w.tensors.vector(f"{block}.ssm_dt.bias", s.heads),
        skip=w.tensors.vector(f"{block}.ssm_d", 1, s.heads),
        key_heads=s.key_heads,
    )
    y = plan.gated(z, y, Activation.SILU)
    norm, features = f"{block}.ssm_norm.weight", s.values // s.key_heads
    if norm not in w.tensors:
        return y
    return plan.headnorm(y, w.tensors.vector(norm, features, s.key_heads).reshape(s.key_heads, features), w.epsilon)
