"""Tests of the kernels of LoRA adapters against their twins, which round in the same places."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmrun.formats.gguf.adapter import EMBEDDING
from llmrun.model.plan import reference
from llmrun.model.plan.matrix import Matrix
from llmrun.model.plan.plan import Plan
from llmrun.model.plan.twin import Value
from tests.support.kernels.random_adapters import some_scales, with_random_adapters
from tests.support.kernels.runs import LEVELS_HERE, random_matrix, run_plan

pytestmark = pytest.mark.push


def build(plan: Plan, x: Value, weights: list[Matrix]) -> None:
    """Append a sum of two products of x, and an output."""
    first, second, last = weights
    h = plan.linear(x, first)
    plan.linear_add(x, second, to=h)
    plan.output(h, last)


def plan_with_adapters(x: NDArray[np.float32], weights: list[Matrix], ranks: list[int]) -> Plan:
    plan = Plan()
    data = np.ascontiguousarray(x).view(np.uint8).reshape(-1)
    build(plan, plan.embed(Matrix.of_bytes("x", "f32", len(x), x.shape[1], data)), weights)
    return with_random_adapters(plan, ranks)


@pytest.mark.parametrize("level", LEVELS_HERE)
@given(data=st.data())
@settings(max_examples=6)
def test_kernels_equal_their_twins(level: str, data: st.DataObject) -> None:
    rows, threads = data.draw(st.sampled_from([1, 2, 3, 5, 8, 21])), data.draw(st.integers(1, 4))
    width, outputs = data.draw(st.sampled_from([1, 3, 16, 75, 300])), data.draw(st.sampled_from([1, 16, 37, 290]))
    ranks = data.draw(st.lists(st.sampled_from([1, 4, 16, 17, 64]), min_size=1, max_size=4))
    weights = [
        random_matrix("f32", *shape, name=name)
        for name, shape in (("a", (outputs, width)), ("b", (outputs, width)), ("output", (50, outputs)))
    ]
    x = np.random.default_rng(0).normal(0, 1, (rows, width)).astype(np.float32)
    scales = some_scales(rows, len(ranks), seed=rows)
    change = partial(with_random_adapters, ranks=ranks)
    result = run_plan(
        lambda plan, value: build(plan, value, weights), x, level=level, threads=threads, change=change, scales=scales
    )
    plan = plan_with_adapters(x, weights, ranks)
    expected = reference.quantizing(plan, np.arange(rows, dtype=np.int32), "f16", scales)
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6 * max(1.0, float(np.abs(expected).max())))


@pytest.mark.parametrize("threads", [1, 3])
def test_embeddings_are_adapted(threads: int) -> None:
    table = random_matrix("q8_0", 40, 64, name=EMBEDDING)

    def with_embedding(plan: Plan) -> Plan:
        whole = Plan()
        whole.output(whole.embed(table, scale=3.0), random_matrix("f32", 30, 64, name="output"))
        return with_random_adapters(whole, [5, 16])

    x, scales = np.zeros((33, 16), np.float32), some_scales(33, 2)
    result = run_plan(
        lambda plan, value: plan.output(value, random_matrix("f32", 16, 16)),
        x,
        threads=threads,
        change=with_embedding,
        scales=scales,
    )
    expected = reference.quantizing(with_embedding(Plan()), np.arange(33, dtype=np.int32), "f16", scales)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
