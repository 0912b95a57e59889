"""A plan with every row op, float32 weights, and widths that are not multiples of a vector."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmrun.plan.matrix import Matrix
from llmrun.plan.ops.activations import Activation
from llmrun.plan.plan import Plan
from llmrun.plan.values import Value
from tests.support.kernels.runs import matrix_of

TOKENS = 37  # vocabulary size
_WIDTH, _HEADS, _HEAD_SIZE, _HIDDEN, _CONVOLVED, _TAPS = 75, 4, 16, 101, 32, 3


def row_ops_plan() -> Plan:
    """Return a plan with two residual streams that only row ops add to. One is private to each thread, the other
    shared."""
    plan = Plan()
    x = plan.embed(_matrix("embedding", TOKENS, _WIDTH), scale=3.0)
    shared = plan.linear(x, _matrix("shared", _WIDTH, _WIDTH))

    h = plan.layernorm(x, _vector(_WIDTH), _vector(_WIDTH), 1e-5)
    heads = plan.bias(plan.linear(h, _matrix("heads", _HEADS * _HEAD_SIZE, _WIDTH)), _vector(_HEADS * _HEAD_SIZE))
    heads = plan.activate(plan.headnorm(heads, _vector(_HEAD_SIZE), 1e-6), Activation.GELU)
    heads = _other_heads(plan, heads)
    plan.add(plan.linear(heads, _matrix("from_heads", _WIDTH, _HEADS * _HEAD_SIZE)), to=x, scale=0.22)

    h = plan.rmsnorm(x, _vector(_WIDTH), 1e-5)
    looked_back = plan.convolve(plan.linear(h, _matrix("bcy", 3 * _CONVOLVED, _WIDTH)), _taps())
    found = plan.linear(looked_back, _matrix("from_convolved", _WIDTH, _CONVOLVED))
    plan.add(plan.rmsnorm(found, _vector(_WIDTH), 1e-5), to=x)
    plan.add(plan.rmsnorm(found, _vector(_WIDTH), 1e-5), to=shared)

    gate, up = (plan.linear(h, _matrix(name, _HIDDEN, _WIDTH)) for name in ("gate", "up"))
    gate, up = plan.bias(gate, _vector(_HIDDEN)), plan.bias(up, _vector(_HIDDEN))
    for activation in Activation:
        made = plan.linear(plan.gated(gate, up, activation), _matrix(f"from_{activation.name}", _WIDTH, _HIDDEN))
        share = plan.bias(plan.linear(h, _matrix(f"share_{activation.name}", 1, _WIDTH)), _vector(1))
        plan.add_gated(made, share, to=x)
        plan.add_gated(plan.bias(made, _vector(_WIDTH)), share, to=shared)

    plan.scale(shared, 0.7)
    plan.add(shared, to=x, scale=0.5)
    plan.scale(x, 1.7)
    wanted = plan.layernorm_wanted(x, _vector(_WIDTH), None, 1e-5)
    plan.scale(wanted, 0.9)
    ends = plan.concat(plan.slice(wanted, _WIDTH - 9, 9), plan.slice(wanted, 0, _WIDTH - 9))
    plan.output(ends, _matrix("output", TOKENS, _WIDTH))
    plan.soft_cap_logits(2.0)
    return plan


def _other_heads(plan: Plan, heads: Value) -> Value:
    """Concatenate slices of each head with features shared by all heads, then multiply each head by its own matrix."""
    same = plan.slice(heads, 3, 7)
    some = plan.slice(heads, _HEAD_SIZE - 5, 5, groups=_HEADS)
    more = plan.concat(
        plan.concat_to_each(same, some, groups=_HEADS), plan.slice(heads, 1, 16, groups=2), groups=_HEADS
    )
    return plan.head_linear(more, _matrix("of heads", _HEADS * _HEAD_SIZE, 7 + 5 + 8), heads=_HEADS)


def _matrix(name: str, rows: int, columns: int) -> Matrix:
    random = np.random.default_rng(len(name))
    return matrix_of("f32", (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32), name)


def _vector(width: int) -> NDArray[np.float32]:
    return (1 + 0.3 * np.random.default_rng(width).standard_normal(width)).astype(np.float32)


def _taps() -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal((_CONVOLVED, _TAPS)).astype(np.float32)
