"""Tests of per-head matrices: equal to separate products of each part of a row, for any step size and thread count."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.backends.cpu.lower import lower
from llmrun.backends.cpu.weights import reserve
from llmrun.model.plan.matrix import Matrix
from llmrun.model.plan.plan import Plan
from llmrun.model.plan.reference import quantizing
from llmrun.model.plan.twin import Value, dequantized
from scripts.kernel_list import FLOAT_TYPES
from tests.support.kernels.runs import (
    EPSILON,
    EXPERT_TYPES,
    LEVELS_HERE,
    matrix_of,
    random_matrix,
    run_linear,
    run_plan,
    whole_matrix,
    width,
)

EVERY_LEVEL = pytest.mark.parametrize("level", LEVELS_HERE)
EVERY_TYPE = pytest.mark.parametrize("kind", [*EXPERT_TYPES, *FLOAT_TYPES])
HEADS, OUTPUTS = 3, 48
ROWS = (1, 2, 3, 5, 15, 16, 43)  # around tile sizes, and where weights are unpacked


def head_matrix(kind: str, outputs: int = OUTPUTS) -> Matrix:
    return random_matrix(kind, HEADS * outputs, width(kind, 44), seed=outputs)


def product_of(weight: Matrix) -> Callable[[Plan, Value], None]:
    """Return the op and its unmodified output."""

    def build(plan: Plan, x: Value) -> None:
        unit = np.eye(weight.rows, dtype=np.float32)
        plan.output(plan.head_linear(x, weight, HEADS), matrix_of("f32", unit, "unit"))

    return build


def random_rows(rows: int, columns: int) -> NDArray[np.float32]:
    return np.random.default_rng(rows).standard_normal((rows, HEADS * columns)).astype(np.float32)


@pytest.mark.push
@EVERY_LEVEL
@EVERY_TYPE
@pytest.mark.parametrize("rows", [1, 5, 19])
def test_each_head_is_what_its_matrix_alone_makes_of_it(level: str, kind: str, rows: int) -> None:
    """The bits are equal, because each product uses only one slice of a row and one slice of the matrix."""
    weight = head_matrix(kind)
    x = random_rows(rows, weight.columns)
    found = run_plan(product_of(weight), x, level=level, threads=1 + rows % 3)
    for head in range(HEADS):
        columns = slice(head * weight.columns, (head + 1) * weight.columns)
        alone = run_linear(weight.part(head * OUTPUTS, OUTPUTS), np.ascontiguousarray(x[:, columns]), level=level)
        np.testing.assert_array_equal(found[:, head * OUTPUTS : (head + 1) * OUTPUTS], alone)


@pytest.mark.push
@EVERY_TYPE
def test_a_plan_is_near_its_twin(kind: str) -> None:
    """Allow 4 roundings of the sum of magnitudes, as test_linear.py does for one matrix."""
    weight, rows = head_matrix(kind), 9
    x = random_rows(rows, weight.columns)
    twin = Plan()
    product_of(weight)(twin, twin.embed(matrix_of("f32", x, "x")))
    expected = quantizing(twin, np.arange(rows, dtype=np.int32), "f16")
    weights = np.abs(dequantized(weight)).reshape(HEADS, OUTPUTS, -1)
    magnitude = np.einsum("hok,rhk->rho", weights, np.abs(x).reshape(rows, HEADS, -1)).reshape(rows, -1)
    assert (np.abs(run_plan(product_of(weight), x, threads=2) - expected) / (EPSILON * magnitude)).max() <= 4


@pytest.mark.push
@EVERY_LEVEL
@EVERY_TYPE
def test_a_row_depends_neither_on_the_others_nor_on_the_threads(level: str, kind: str) -> None:
    weight = head_matrix(kind, outputs=16)
    x = random_rows(max(ROWS), weight.columns)
    together = run_plan(product_of(weight), x, level=level, threads=4)
    for rows in ROWS:
        part = run_plan(product_of(weight), x[-rows:], level=level, threads=1 + rows % 3)
        np.testing.assert_array_equal(part, together[-rows:])


@pytest.mark.push
@EVERY_LEVEL
@pytest.mark.parametrize("kind", EXPERT_TYPES)
@pytest.mark.parametrize("rows", [1, 18])
def test_integers_are_exact(level: str, kind: str, rows: int) -> None:
    weight = whole_matrix(kind, HEADS * OUTPUTS, width(kind, 96), 3)
    integers = np.random.default_rng(rows).integers(-100, 101, (rows, HEADS, weight.columns))
    integers[:, :, 5::32] = 127
    weights = dequantized(weight).astype(np.float64).reshape(HEADS, OUTPUTS, -1)
    expected = np.einsum("hok,rhk->rho", weights, integers).reshape(rows, -1)
    assert np.abs(expected).max() < 2**23
    x = integers.reshape(rows, -1).astype(np.float32)
    np.testing.assert_array_equal(run_plan(product_of(weight), x, level=level, threads=2), expected)


@pytest.mark.push
@pytest.mark.parametrize("kind", ["q4_k", "f32"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_head_that_is_not_finite_harms_no_other(kind: str, poison: float) -> None:
    weight, rows = head_matrix(kind), 18
    clean = random_rows(rows, weight.columns)
    poisoned = clean.copy()
    poisoned[4, weight.columns + 3] = poison  # in the second head's columns
    for head in range(HEADS):

        def build(plan: Plan, x: Value, head: int = head) -> None:
            made = plan.slice(plan.head_linear(x, weight, HEADS), head * OUTPUTS, OUTPUTS)
            plan.output(made, matrix_of("f32", np.eye(OUTPUTS, dtype=np.float32), "unit"))

        before, after = (run_plan(build, x, threads=2) for x in (clean, poisoned))
        assert np.isfinite(before).all()
        harmed = (after != before).any(axis=1)
        assert np.flatnonzero(harmed).tolist() == ([4] if head == 1 else [])


@pytest.mark.parametrize("shape", [(HEADS * 17, 64), (HEADS * 16, 63)])
def test_parts_that_would_reach_into_another_head_are_refused(shape: tuple[int, int]) -> None:
    """Covers head outputs that do not fill whole groups, and columns that do not fill a kernel's vectors."""
    plan, weight = Plan(), random_matrix("f32", *shape)
    plan.output(
        plan.head_linear(plan.embed(random_matrix("f32", 4, HEADS * shape[1], name="x")), weight, HEADS), weight
    )
    with pytest.raises(AssertionError, match=r"whole groups|columns of one head"):
        lower(plan, reserve(plan.matrices), [], kv_type="f16", max_rows=4, n_threads=1)
