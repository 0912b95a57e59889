"""Tests of quantized activations against their NumPy twin at every level, in groups of blocks and remainders."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from llmrun.base.compiled.kernel import KernelName
from llmrun.formats.layouts import linear, records
from llmrun.formats.layouts.arena import address_of, allocate
from llmrun.model.plan.ops.linear import QuantizeWords, quantize_reference
from tests.support.kernels.runs import LEVELS_HERE, run_kernel
from tests.support.tiers import examples

pytestmark = pytest.mark.push

EVERY_LEVEL = pytest.mark.parametrize("level", LEVELS_HERE)


def run_quantize(
    x: NDArray[np.float32], level: str, threads: int = 1
) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]:
    """Return (integers, scales, offsets, sums, negated sums of the first halves).

    Integers are int8[rows, blocks, 32]; the others are [rows, blocks].
    """
    rows, blocks = len(x), x.shape[1] // 32
    out = allocate(rows * linear.quantized_row_bytes(x.shape[1]), "quantized rows").reshape(rows, blocks, -1)
    words = QuantizeWords(
        x=address_of(x),
        x_stride=x.strides[0],
        out=address_of(out),
        out_stride=out.strides[0],
        blocks=blocks,
    )
    name = KernelName.of("linear.quantize", "quantize")
    run_kernel(name, words, {records.STEP_ROWS: rows}, level=level, threads=threads)
    floats, integers = out.view(np.float32), out.view(np.int32)
    return (
        out[:, :, linear.INTEGERS : linear.INTEGERS + 32].view(np.int8),
        floats[:, :, linear.SCALE // 4],
        integers[:, :, linear.OFFSET // 4],
        floats[:, :, linear.SUM // 4],
        integers[:, :, linear.FIRST_HALF // 4],
    )


ACTIVATIONS = hnp.arrays(
    np.float32,
    st.tuples(st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 3, 15, 16, 17, 33]).map(lambda blocks: 32 * blocks)),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100),
)


@EVERY_LEVEL
@given(x=ACTIVATIONS, threads=st.integers(1, 4))
@settings(max_examples=examples(60))
def test_quantized_activations_equal_the_twin(level: str, x: NDArray[np.float32], threads: int) -> None:
    integers, scales, offsets, sums, first_halves = run_quantize(x, level, threads)
    expected, expected_scales = quantize_reference(x)
    np.testing.assert_array_equal(integers, expected)
    np.testing.assert_array_equal(scales, expected_scales)
    totals = expected.astype(np.int32).sum(-1)
    np.testing.assert_array_equal(offsets, -8 * totals)
    np.testing.assert_array_equal(sums, expected_scales * totals.astype(np.float32))
    np.testing.assert_array_equal(first_halves, -integers[:, :, :16].astype(np.int32).sum(-1))


@EVERY_LEVEL
@pytest.mark.parametrize("blocks", [1, 16])
@pytest.mark.parametrize("largest", [1e-45, 1e-38, 9e-37, 1.1e-36, 1e-30, 1.0, 3.4e38])
def test_quantizing_any_magnitude_keeps_integers_in_range(level: str, largest: float, blocks: int) -> None:
    """Only the last block holds the value; the blocks before it are zero."""
    x = np.zeros((1, 32 * blocks), np.float32)
    x[0, -32:] = (np.linspace(-1, 1, 32) * largest).astype(np.float32)
    integers, scales, *_ = run_quantize(x, level)
    assert np.abs(integers.astype(np.int32)).max() == (127 if largest > 1e-36 else 0)
    np.testing.assert_allclose(integers[0, -1] * scales[0, -1], x[0, -32:], atol=max(largest / 253, 1e-36))


@EVERY_LEVEL
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("block", [1, 16])
def test_a_block_that_is_not_finite_harms_no_other(level: str, poison: float, block: int) -> None:
    x = np.random.default_rng(0).standard_normal((3, 17 * 32)).astype(np.float32)
    clean = run_quantize(x, level)
    x[1, 32 * block + 8] = poison
    poisoned = run_quantize(x, level)
    others = np.ones((3, 17), np.bool_)
    others[1, block] = False
    for index in range(len(clean)):
        np.testing.assert_array_equal(poisoned[index][others], clean[index][others])


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 2, 5, 64, 65, 129, 200, 257])
def test_every_row_is_quantized_whatever_the_number_of_threads(rows: int, threads: int) -> None:
    """Up to 64 rows per thread are divided equally, and more are claimed in runs."""
    x = np.random.default_rng(rows).standard_normal((rows, 32)).astype(np.float32)
    integers, scales, *_ = run_quantize(x, LEVELS_HERE[0], threads)
    expected, expected_scales = quantize_reference(x)
    np.testing.assert_array_equal(integers, expected)
    np.testing.assert_array_equal(scales, expected_scales)
