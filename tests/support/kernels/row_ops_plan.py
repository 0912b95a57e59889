"""A plan with every row op, float32 weights, and widths that are not multiples of a vector."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmrun.formats.gguf.adapter import EMBEDDING
from llmrun.model.plan.matrix import Matrix
from llmrun.model.plan.ops.activations import Activation, XieluCurve
from llmrun.model.plan.plan import Plan
from llmrun.model.plan.twin import Value
from tests.support.kernels.runs import matrix_of

TOKENS = 37  # vocabulary size
_WIDTH, _HEADS, _HEAD_SIZE, _HIDDEN, _CONVOLVED = 75, 4, 16, 101, 32


def row_ops_plan() -> Plan:
    """Return a plan with two residual streams that only row ops add to. One is private to each thread, the other
    shared."""
    plan = Plan()
    x = plan.embed(_matrix(EMBEDDING, TOKENS, _WIDTH), scale=3.0)
    shared = plan.linear(x, _matrix("shared", _WIDTH, _WIDTH))

    h = plan.layernorm(x, _vector(_WIDTH), _vector(_WIDTH), 1e-5)
    heads = plan.bias(plan.linear(h, _matrix("heads", _HEADS * _HEAD_SIZE, _WIDTH)), _vector(_HEADS * _HEAD_SIZE))
    heads = plan.activate(plan.headnorm(heads, _vector(_HEAD_SIZE), 1e-6), Activation.GELU)
    heads = _other_heads(plan, heads)
    plan.add(plan.linear(heads, _matrix("from_heads", _WIDTH, _HEADS * _HEAD_SIZE)), to=x, scale=0.22)

    h = plan.rmsnorm(x, _vector(_WIDTH), 1e-5)
    looked_back = plan.convolve(plan.linear(h, _matrix("bcy", 3 * _CONVOLVED, _WIDTH)), _taps(_CONVOLVED, 3))
    found = plan.linear(looked_back, _matrix("from_convolved", _WIDTH, _CONVOLVED))
    plan.add(plan.rmsnorm(found, _vector(_WIDTH), 1e-5), to=x)
    plan.add(plan.rmsnorm(found, _vector(_WIDTH), 1e-5), to=shared)

    _recurrent_layers(plan, h, x)

    gate, up = (plan.linear(h, _matrix(name, _HIDDEN, _WIDTH)) for name in ("gate", "up"))
    gate, up = plan.bias(gate, _vector(_HIDDEN)), plan.bias(up, _vector(_HIDDEN))
    for activation in Activation:
        made = plan.linear(plan.gated(gate, up, activation), _matrix(f"from_{activation.name}", _WIDTH, _HIDDEN))
        share = plan.bias(plan.linear(h, _matrix(f"share_{activation.name}", 1, _WIDTH)), _vector(1))
        plan.add_gated(made, share, to=x)
        plan.add_gated(plan.bias(made, _vector(_WIDTH)), share, to=shared)

    up = plan.clamp(up, -0.8, 0.9)
    curved = plan.xielu(up, XieluCurve(positive=1.2, negative=1.7, slope=0.5, least=-1e-6))
    plan.linear_add(curved, _matrix("from_curved", _WIDTH, _HIDDEN), to=shared)

    _weighted_sums(plan, x, shared)

    plan.scale(shared, 0.7)
    plan.add(shared, to=x, scale=0.5)
    plan.scale(x, 1.7)
    wanted = plan.layernorm_wanted(x, _vector(_WIDTH), None, 1e-5)
    plan.scale(wanted, 0.9)
    ends = plan.concat(plan.slice(wanted, _WIDTH - 9, 9), plan.slice(wanted, 0, _WIDTH - 9))
    plan.output(ends, _matrix("output", TOKENS, _WIDTH))
    plan.soft_cap_logits(2.0)
    return plan


def _weighted_sums(plan: Plan, x: Value, shared: Value) -> None:
    """Add a function of both streams to one of them, with factors that come from a row."""
    factors = plan.activate(plan.linear(x, _matrix("factors", 3, _WIDTH)), Activation.TANH)
    total = plan.plus_weighted(shared, plan.multiply(x, _vector(_WIDTH)), factors, 1)
    plan.add_weighted(x, factors, 2, to=total, offset=1.0)
    above = plan.cut_off(plan.match_length(total, x), 0.7)
    plan.add(plan.linear(above, _matrix("from weighted", _WIDTH, _WIDTH)), to=shared)


def _recurrent_layers(plan: Plan, h: Value, x: Value) -> None:
    """Add the outputs of a delta rule, of SSD and of a selective scan to x. Their heads have different sizes."""
    keys, values, heads = 2 * 16, 4 * 48, 4
    inputs = plan.linear(h, _matrix("delta inputs", 2 * keys + values, _WIDTH))
    q, k, v = plan.causal_convolution(inputs, _taps(inputs.width, 4), None, (keys, keys, values))
    q, k = plan.l2norm(q, 16, 1e-5, scale=0.25), plan.l2norm(k, 16, 1e-5)
    gate, beta = (plan.linear(h, _matrix(name, heads, _WIDTH)) for name in ("decays", "betas"))
    beta = plan.bias(beta, _vector(heads))  # private to each thread
    out = plan.delta_rule(q, k, v, gate, beta, rate=-_vector(heads), bias=_vector(heads), key_heads=2, shared=1)
    out = plan.headnorm(out, _vector(values).reshape(2, -1), 1e-5)
    plan.add(plan.linear(out, _matrix("from delta", _WIDTH, values)), to=x)

    keys, values = 32, 4 * 32
    inputs = plan.linear(h, _matrix("ssd inputs!", 2 * keys + values, _WIDTH))
    some, b, c = plan.causal_convolution(inputs, _taps(inputs.width, 3), _vector(inputs.width), (values, keys, keys))
    gate = plan.bias(plan.linear(h, _matrix("steps", heads, _WIDTH)), _vector(heads))
    skip = _vector(heads)
    out = plan.ssd(some, b, c, gate, rate=-0.3 * skip, bias=skip, skip=skip, key_heads=1)
    plan.add(plan.linear(out, _matrix("from ssd", _WIDTH, values)), to=x)

    keys, values = 16, 48
    some, gate = (plan.linear(h, _matrix(name, values, _WIDTH)) for name in ("scanned", "scan steps"))
    b, c = (plan.linear(h, _matrix(name, keys, _WIDTH)) for name in ("b of scan", "c of the scan"))
    rate, gate = -_vector(values * keys).reshape(values, keys), plan.bias(gate, _vector(values))
    out = plan.selective_scan(some, b, c, gate, rate=rate, bias=_vector(values), skip=_vector(values))
    plan.add(plan.linear(out, _matrix("from scan", _WIDTH, values)), to=x)


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


def _taps(width: int, taps: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal((width, taps)).astype(np.float32)
