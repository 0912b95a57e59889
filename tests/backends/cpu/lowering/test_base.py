"""Tests of the barriers that lowering adds where one thread may write what others still read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.model.plan.plan import Plan
from llmrun.model.plan.shapes import AttentionShape
from llmrun.model.plan.twin import Value
from tests.support.kernels.lowered_plans import count_barriers, lowered_plan, without_optional
from tests.support.kernels.races import needless_barriers, races
from tests.support.kernels.random_adapters import with_random_adapters
from tests.support.kernels.runs import matrix_of

OPS = ("rmsnorm", "bias", "linear", "linear_add", "add", "scale", "add_weighted", "attention")


@pytest.mark.push
@given(
    kind=st.sampled_from(["f32", "q8_0"]),
    ops=st.lists(st.tuples(st.sampled_from(OPS), st.integers(0), st.integers(0)), max_size=12),
    adapted=st.booleans(),
)
def test_ops_in_any_order_do_not_race(kind: str, ops: list[tuple[str, int, int]], adapted: bool) -> None:
    """Products are only added to sums of products, which the threads share."""
    plan, ones, shape = Plan(), np.ones(64, np.float32), AttentionShape(4, 2, 16)
    square = matrix_of(kind, np.eye(64, dtype=np.float32), "square")
    half = matrix_of(kind, np.eye(32, 64, dtype=np.float32), "half")
    sums = [plan.embed(matrix_of("f32", np.ones((4, 64), np.float32), "table"))]
    plan.linear_add(plan.linear(sums[0], square), square, to=sums[0])
    others: list[Value] = []
    for name, first, second in ops:
        values = [*sums, *others]
        x, y, to = values[first % len(values)], values[second % len(values)], sums[second % len(sums)]
        match name:
            case "rmsnorm":
                others.append(plan.rmsnorm(x, ones, 1e-5))
            case "bias":
                others.append(plan.bias(x, ones))
            case "linear":
                sums.append(plan.linear(x, square))
            case "linear_add" if x is not to:
                plan.linear_add(x, square, to=to)
            case "add":
                plan.add(x, to=y)
            case "scale":
                plan.scale(x, 0.5)
            case "add_weighted":
                plan.add_weighted(x, plan.linear(x, half), 1, to=y)
            case "attention":
                k, v = plan.linear(x, half), plan.linear(y, half)
                others.append(plan.attention(plan.attention(x, k, v, shape, None), k, v, shape, None))
    plan.output(plan.concat(sums[-1], [*sums, *others][-1]), matrix_of("f32", np.ones((16, 128), np.float32), "output"))
    lowered = lowered_plan(with_random_adapters(plan, [3, 16]) if adapted else plan)
    for part in (lowered, without_optional(lowered)):
        assert races(part, one_row=True) == races(part, one_row=False) == []


@pytest.mark.parametrize("change", ["scale", "add", "linear_add"])
def test_a_change_waits_for_replicated_readers(change: str) -> None:
    """In a step of one row, threads normalize copies of a value, and one of them changes the value."""
    plan, square = Plan(), matrix_of("f32", np.eye(64, dtype=np.float32))
    x = plan.linear(plan.embed(square), square)
    h = plan.rmsnorm(x, np.ones(64, np.float32), 1e-5)
    match change:
        case "scale":
            plan.scale(x, 0.5)
        case "add":
            plan.add(h, to=x)
        case "linear_add":
            plan.linear_add(h, square, to=x)
    plan.output(x, square)
    lowered = lowered_plan(plan)
    assert count_barriers(lowered, one_row=True) == 4
    assert needless_barriers(lowered, one_row=True) == []
    assert races(lowered, one_row=True) == races(lowered, one_row=False) == []
