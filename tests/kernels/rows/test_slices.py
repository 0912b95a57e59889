"""Tests of slice and concat kernels of any width: the bits are equal and nothing is written outside the slices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.base.compiled.kernel import KernelName
from llmrun.formats.layouts import records
from llmrun.formats.layouts.arena import address_of
from llmrun.model.plan.ops.experts import Gating
from llmrun.model.plan.ops.rows import ConcatWords
from llmrun.model.plan.plan import Plan
from llmrun.model.plan.reference import exact
from llmrun.model.plan.twin import Value
from tests.support.kernels.runs import LEVELS_HERE, matrix_of, padded_rows, run_kernel, run_plan

pytestmark = pytest.mark.push

EVERY_LEVEL = pytest.mark.parametrize("level", LEVELS_HERE)


def random_rows(rows: int, width: int) -> NDArray[np.float32]:
    return np.random.default_rng(width).standard_normal((rows, width)).astype(np.float32)


@EVERY_LEVEL
@pytest.mark.parametrize(("of_a", "of_b", "parts"), [(1, 2, 3), (16, 64, 2), (37, 0, 5), (3, 16, 1), (512, 64, 4)])
def test_concatenated_parts_lie_side_by_side(level: str, of_a: int, of_b: int, parts: int) -> None:
    """Covers a different slice of `a` for each part, and the first slice repeated in all parts."""
    rows, size = 7, of_a + of_b
    a, b = random_rows(rows, of_a * parts), random_rows(rows, max(1, of_b * parts))
    for step in (of_a, 0):
        from_a, from_b = padded_rows(a), padded_rows(b)
        joined = padded_rows(np.full((rows, size * parts), np.nan, np.float32))
        words = ConcatWords(
            a=address_of(from_a),
            a_stride=from_a.strides[0],
            a_step=4 * step,
            a_bytes=4 * of_a,
            b=address_of(from_b),
            b_stride=from_b.strides[0],
            b_step=4 * of_b,
            b_bytes=4 * of_b,
            out=address_of(joined),
            out_stride=joined.strides[0],
            parts=parts,
        )
        name = KernelName.of("rows.rowwise", "concat")
        run_kernel(name, words, {records.STEP_ROWS: rows}, level=level, threads=3)
        parts_of_a = a.reshape(rows, parts, of_a) if step else np.repeat(a[:, None, :of_a], parts, axis=1)
        expected = np.concatenate([parts_of_a, b[:, : of_b * parts].reshape(rows, parts, of_b)], axis=2)
        np.testing.assert_array_equal(joined[:, : size * parts], expected.reshape(rows, -1))
        assert not joined[:, size * parts :].any(), "the padding of a row must stay zero"


def assert_same_as_twin(build: Callable[[Plan, Value], None], x: NDArray[np.float32], threads: int) -> None:
    twin = Plan()
    build(twin, twin.embed(matrix_of("f32", x, "x")))
    expected = exact(twin, np.arange(len(x), dtype=np.int32))
    np.testing.assert_array_equal(run_plan(build, x, threads=threads), expected)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_parts_of_a_plan_are_its_twins(rows: int, threads: int) -> None:
    """Covers values that each thread has a copy of, and shared values."""

    def build(plan: Plan, x: Value) -> None:
        shared = plan.linear(x, matrix_of("f32", np.eye(60, dtype=np.float32), "unit"))
        part = plan.slice(x, 7, 11)
        of_each = plan.slice(shared, 1, 3, groups=5)
        both = plan.concat(plan.slice(x, 2, 9, groups=5), of_each, groups=5)
        joined = plan.concat_to_each(part, both, groups=5)
        plan.output(joined, matrix_of("f32", np.eye(joined.width, dtype=np.float32), "logits"))

    assert_same_as_twin(build, random_rows(rows, 60), threads)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_value_is_scaled_where_it_is(rows: int, threads: int) -> None:
    """Covers a value that each thread has a copy of, and a shared value.

    Ops that read the value earlier see it unscaled.
    """

    def build(plan: Plan, x: Value) -> None:
        unit = matrix_of("f32", np.eye(40, dtype=np.float32), "unit")
        shared = plan.linear(x, unit)
        plan.scale(x, 0.3)
        before = plan.linear(shared, unit)
        plan.scale(shared, -1.7)
        joined = plan.concat(plan.concat(x, before), shared)
        plan.output(joined, matrix_of("f32", np.eye(120, dtype=np.float32), "logits"))

    assert_same_as_twin(build, random_rows(rows, 40), threads)


@pytest.mark.parametrize("rows", [1, 6])
def test_a_scaled_value_is_made_integers_anew(rows: int) -> None:
    def build(plan: Plan, x: Value) -> None:
        weight = matrix_of("q8_0", np.eye(64, dtype=np.float32), "w")
        before = plan.linear(x, weight)
        plan.scale(x, 2.0)
        joined = plan.concat(before, plan.linear(x, weight))
        plan.output(joined, matrix_of("f32", np.eye(128, dtype=np.float32), "logits"))

    before, after = np.split(run_plan(build, random_rows(rows, 64), threads=2), 2, axis=1)
    np.testing.assert_array_equal(after, 2 * before)
    assert before.any()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 4])
def test_rows_of_experts_have_parts_and_scales_too(rows: int, threads: int) -> None:
    """Swaps the halves of rows that come from experts. In a step of one row, each thread has its own copy."""
    x = np.abs(random_rows(rows, 48))
    unit = matrix_of("f32", np.eye(48, dtype=np.float32), "unit")
    experts = matrix_of("f32", np.concatenate([np.eye(48, dtype=np.float32)] * 3), "experts")

    def build(plan: Plan, x: Value) -> None:
        router = matrix_of("f32", np.zeros((3, 48), np.float32), "router")
        routing = plan.route(plan.linear(x, router), 2, Gating.SOFTMAX_OF_CHOSEN, normalized=False)
        y = plan.expert_linear(x, experts, routing)
        turned = plan.concat(plan.slice(y, 24, 24), plan.slice(y, 0, 24))
        plan.scale(turned, 3.0)
        total = plan.linear(x, unit)
        plan.combine(turned, routing, to=total)
        plan.output(total, unit)

    expected = x + 3 * np.roll(x, 24, axis=1)
    np.testing.assert_allclose(run_plan(build, x, threads=threads), expected, rtol=1e-6)
