"""Tests of linear layers: integers are exact at every level and extreme, and floats are near their NumPy twins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmrun.model.plan.matrix import Matrix
from llmrun.model.plan.ops.linear import float_linear_reference, integer_linear_reference, quantize_reference
from llmrun.model.plan.plan import Plan
from llmrun.model.plan.reference import integers_of
from llmrun.model.plan.twin import Value, dequantized
from scripts.kernel_list import FLOAT_TYPES
from tests.support.kernels.runs import (
    INTEGER_TYPES,
    LEVELS_HERE,
    WEIGHT_TYPES,
    matrix_of,
    random_matrix,
    run_linear,
    run_plan,
    whole_matrix,
    width,
)

pytestmark = pytest.mark.push

STEP_ROWS = (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 43)  # around the tile sizes, and around the start of panels


def whole_activations(integers: NDArray[np.int8]) -> NDArray[np.float32]:
    """Return float32[rows, 32 * blocks] that quantizes to the given integers, int8[rows, blocks, 32], with a scale of
    1.

    Every block gets one value of 127.
    """
    integers = integers.copy()
    integers[:, :, 5] = np.where(integers[:, :, 5] < 0, -127, 127)
    return integers.reshape(len(integers), -1).astype(np.float32)


@pytest.mark.parametrize("level", LEVELS_HERE)
@pytest.mark.parametrize("kind", INTEGER_TYPES)
@given(data=st.data())
@settings(max_examples=8)
def test_integers_are_exact(level: str, kind: str, data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1), label="seed")
    outputs, blocks = data.draw(st.sampled_from([1, 15, 16, 17, 50])), data.draw(st.sampled_from([1, 2, 3, 5]))
    rows, threads = data.draw(st.sampled_from(STEP_ROWS)), data.draw(st.integers(1, 4))
    matrix = whole_matrix(kind, outputs, width(kind, 32 * blocks), seed)
    integers = np.random.default_rng(seed).integers(-127, 128, (rows, matrix.columns // 32, 32))
    x = whole_activations(integers.astype(np.int8))
    expected = x.astype(np.float64) @ dequantized(matrix).astype(np.float64).T
    assert np.abs(expected).max() < 2**23
    np.testing.assert_array_equal(run_linear(matrix, x, level=level, threads=threads), expected)


@pytest.mark.cover(2)
@pytest.mark.parametrize("level", LEVELS_HERE)
@pytest.mark.parametrize("kind", WEIGHT_TYPES)
@pytest.mark.parametrize("rows", STEP_ROWS)
def test_floats_equal_the_twin(level: str, kind: str, rows: int) -> None:
    random = np.random.default_rng(rows)
    matrix = random_matrix(kind, 37, width(kind, 160 if kind in INTEGER_TYPES else 75), rows)
    x = random.standard_normal((rows, matrix.columns)).astype(np.float32)
    actual = run_linear(matrix, x, level=level, threads=1 + rows % 4)
    np.testing.assert_array_equal(actual, twin(matrix, x))


def twin(matrix: Matrix, x: NDArray[np.float32]) -> NDArray[np.float32]:
    if not matrix.is_integer:
        return float_linear_reference(dequantized(matrix), x)
    integers, scales, mins = integers_of(matrix)
    quantized, x_scales = quantize_reference(x)
    return integer_linear_reference(integers, scales, mins, quantized, x_scales)


@pytest.mark.cover(1)
@pytest.mark.parametrize("level", LEVELS_HERE)
@pytest.mark.parametrize("kind", WEIGHT_TYPES)
def test_a_value_depends_neither_on_the_tile_nor_on_the_threads(level: str, kind: str) -> None:
    random = np.random.default_rng(0)
    matrix = random_matrix(kind, 1030, width(kind, 96))
    x = random.standard_normal((43, matrix.columns)).astype(np.float32)
    together = run_linear(matrix, x, level=level, threads=4)
    for rows in range(1, 34):
        np.testing.assert_array_equal(run_linear(matrix, x[:rows], level=level, threads=1 + rows % 4), together[:rows])


@pytest.mark.parametrize("level", LEVELS_HERE)
@pytest.mark.parametrize("kind", INTEGER_TYPES)
def test_integer_results_are_equal_over_levels(level: str, kind: str) -> None:
    """Scales that are powers of two leave no rounding that could differ."""
    matrix = whole_matrix(kind, 33, width(kind, 96), 3)
    integers = np.random.default_rng(3).integers(-127, 128, (19, matrix.columns // 32, 32))
    x = whole_activations(integers.astype(np.int8))
    np.testing.assert_array_equal(run_linear(matrix, x, level=level), run_linear(matrix, x, level="portable"))


@pytest.mark.cover(2)
@pytest.mark.parametrize("kind", WEIGHT_TYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 18, 43])
def test_adding_onto_a_value(kind: str, rows: int) -> None:
    """Computes x + w.x, as for a residual connection. The sum is rounded once more."""
    random = np.random.default_rng(7)
    size = width(kind, 96)
    matrix = random_matrix(kind, size, size)
    unit = matrix_of("f32", np.eye(size, dtype=np.float32), "unit")
    x = random.standard_normal((rows, size)).astype(np.float32)

    def build(plan: Plan, value: Value) -> None:
        copy = plan.linear(value, unit)
        plan.linear_add(value, matrix, to=copy)
        plan.output(copy, unit)

    product = run_linear(matrix, x)
    np.testing.assert_array_equal(run_plan(build, x, threads=3), x + product)


@pytest.mark.cover(2)
@pytest.mark.parametrize("kind", WEIGHT_TYPES)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38, 1e-40])
def test_a_row_that_is_not_finite_harms_no_other(kind: str, poison: float) -> None:
    random = np.random.default_rng(1)
    matrix = random_matrix(kind, 40, width(kind, 64))
    x = random.standard_normal((18, matrix.columns)).astype(np.float32)
    clean = run_linear(matrix, x)
    x[4, 10] = poison
    poisoned = run_linear(matrix, x)
    others = np.arange(18) != 4
    np.testing.assert_array_equal(poisoned[others], clean[others])


@pytest.mark.parametrize("kind", FLOAT_TYPES)
@given(data=st.data())
@settings(max_examples=10)
def test_float_weights_of_any_width(kind: str, data: st.DataObject) -> None:
    """Covers columns that are not a multiple of the kernel's four. The numbers are integers, so the sums are exact."""
    columns, outputs = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 35))
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    weights = random.integers(-128, 129, (outputs, columns)).astype(np.float32)
    x = random.integers(-128, 129, (3, columns)).astype(np.float32)
    np.testing.assert_array_equal(run_linear(matrix_of(kind, weights), x, threads=2), x @ weights.T)
