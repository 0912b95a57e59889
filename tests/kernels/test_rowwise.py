"""Row-wise kernels against their NumPy twins, at every level, with odd widths and rows of any kind."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.kernels import records
from llmrun.kernels.arena import address_of, round_up
from llmrun.kernels.filling import fill
from llmrun.kernels.plan_ops import Activation
from llmrun.kernels.reference import dequantized
from llmrun.kernels.rowwise import gated_reference, rmsnorm_reference
from llmrun.kernels.store import KernelName
from llmrun.kernels.weights import reserve
from tests.support.kernel_runs import (
    FLOAT_TYPES,
    LEVELS_HERE,
    WEIGHT_TYPES,
    padded_rows,
    random_matrix,
    run_kernel,
)
from tests.support.kernel_runs import width as width_of

EVERY_LEVEL = pytest.mark.parametrize("level", LEVELS_HERE)
ROWS = (1, 2, 3, 7, 8, 9, 17)


def float_word(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def ulps(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """The largest distance in units of expected's last place."""
    return float((np.abs(actual - expected) / np.spacing(np.abs(expected))).max())


# --- rmsnorm ----------------------------------------------------------------------------------------------------------


def run_rmsnorm(
    x: NDArray[np.float32], weight: NDArray[np.float32], epsilon: float, level: str, threads: int
) -> NDArray[np.float32]:
    padded, weights = padded_rows(x), padded_rows(weight[None])
    y = np.zeros_like(padded)
    words = [*(address_of(padded), padded.strides[0], address_of(y), y.strides[0], address_of(weights), x.shape[1])]
    words += [float_word(epsilon), 0]
    name = KernelName.of("rowwise", "rmsnorm")
    run_kernel(name, words, {records.STEP_ROWS: len(x)}, level=level, threads=threads)
    assert not y[:, x.shape[1] :].any(), "the padding of a row must stay zero"
    return y[:, : x.shape[1]]


@EVERY_LEVEL
@pytest.mark.parametrize("rows", ROWS)
def test_rmsnorm_is_near_its_twin(level: str, rows: int) -> None:
    """Within 6 units in the last place (4 were the most seen): the sums of squares are added in another order."""
    for width in (1, 16, 33, 64, 576, 1000):
        random = np.random.default_rng(width)
        x = random.standard_normal((rows, width)).astype(np.float32) * np.float32(10)
        weight = (1 + 0.1 * random.standard_normal(width)).astype(np.float32)
        actual = run_rmsnorm(x, weight, 1e-5, level, threads=1 + rows % 4)
        assert ulps(actual, rmsnorm_reference(x, weight, 1e-5)) <= 6


@EVERY_LEVEL
def test_rmsnorm_of_whole_squares_is_exact(level: str) -> None:
    """Sums that no order of adding can round: the mean of 64 squares of 3 is 9."""
    x = np.where(np.arange(64) % 2, 3, -3).astype(np.float32)[None]
    actual = run_rmsnorm(x, np.full(64, 6, np.float32), 0.0, level, threads=1)
    np.testing.assert_array_equal(actual, x * (np.float32(1) / np.float32(3)) * np.float32(6))


@EVERY_LEVEL
def test_rmsnorm_of_zeros_is_zero(level: str) -> None:
    assert not run_rmsnorm(np.zeros((3, 40), np.float32), np.ones(40, np.float32), 1e-5, level, threads=2).any()


@EVERY_LEVEL
def test_rmsnorm_gathers_the_wanted_rows(level: str) -> None:
    x = np.random.default_rng(0).standard_normal((9, 48)).astype(np.float32)
    weight = np.ones(48, np.float32)
    padded, weights, wanted = padded_rows(x), padded_rows(weight[None]), np.array([1, 4, 8], np.int32)
    y = np.zeros((3, 48), np.float32)
    words = [address_of(padded), padded.strides[0], address_of(y), y.strides[0], address_of(weights), 48]
    words += [float_word(1e-5), 1]
    step = {records.STEP_ROWS: 3, records.STEP_WANTED_ROWS: address_of(wanted)}
    run_kernel(KernelName.of("rowwise", "rmsnorm"), words, step, level=level, threads=2)
    np.testing.assert_array_equal(y, run_rmsnorm(x, weight, 1e-5, level, threads=1)[wanted])


# --- gated activation -------------------------------------------------------------------------------------------------


def run_swiglu(gate: NDArray[np.float32], up: NDArray[np.float32], level: str, threads: int) -> NDArray[np.float32]:
    gates, ups = padded_rows(gate), padded_rows(up)
    y = np.zeros_like(gates)
    words = [address_of(gates), gates.strides[0], address_of(ups), ups.strides[0], address_of(y), y.strides[0]]
    name = KernelName.of("rowwise", "swiglu")
    run_kernel(name, [*words, gate.shape[1]], {records.STEP_ROWS: len(gate)}, level=level, threads=threads)
    assert not y[:, gate.shape[1] :].any(), "the padding of a row must stay zero"
    return y[:, : gate.shape[1]]


@EVERY_LEVEL
@pytest.mark.parametrize("rows", ROWS)
def test_swiglu_is_near_its_twin(level: str, rows: int) -> None:
    """Within 5 units in the last place (4 were the most seen): exp is within 2, and its error reaches e / (1 + e)."""
    random = np.random.default_rng(rows)
    gate = np.clip(40 * random.standard_normal((rows, 101)), -87, 87).astype(np.float32)
    up = random.standard_normal((rows, 101)).astype(np.float32)
    actual = run_swiglu(gate, up, level, threads=1 + rows % 4)
    assert ulps(actual, gated_reference(gate, up, Activation.SILU)) <= 5


@EVERY_LEVEL
def test_swiglu_at_its_ends(level: str) -> None:
    gate = np.array([[0.0, -0.0, 200, -200, 3e38, np.inf, np.nan]], np.float32)
    actual = run_swiglu(gate, np.ones_like(gate), level, threads=1)[0]
    np.testing.assert_array_equal(actual[[0, 1, 2, 4, 5, 6]], np.array([0, 0, 200, 3e38, np.inf, np.nan], np.float32))
    assert -1e-30 < actual[3] <= 0


# --- embedding --------------------------------------------------------------------------------------------------------


@EVERY_LEVEL
@pytest.mark.parametrize("kind", WEIGHT_TYPES)
def test_embedded_rows_are_the_dequantized_ones(level: str, kind: str) -> None:
    """Equal bits: both round twice at most, in the same places."""
    columns = 37 if kind in FLOAT_TYPES else width_of(kind, 96)
    table = random_matrix(kind, 50, columns)
    tokens = np.array([49, 0, 7, 7, 31, 48, 1], np.int32)
    y = np.zeros((len(tokens), round_up(columns, 16)), np.float32)
    packed = reserve([table])[table.name]
    fill({table.name: packed}, 1)
    layout = packed.layout
    words = [packed.address, layout.group_bytes, *layout.planes, columns, address_of(y), y.strides[0]]
    step = {records.STEP_ROWS: len(tokens), records.STEP_TOKENS: address_of(tokens)}
    run_kernel(KernelName.of("embed", "embed", weight=table.packed), words, step, level=level, threads=3)
    np.testing.assert_array_equal(y[:, :columns], dequantized(table)[tokens])
    assert not y[:, columns:].any()


# --- a step of one row ------------------------------------------------------------------------------------------------


def test_in_a_step_of_one_row_every_thread_writes_its_own_copy() -> None:
    x = padded_rows(np.random.default_rng(0).standard_normal((1, 64)).astype(np.float32))
    weight, y = np.ones(64, np.float32), np.zeros((4, 64), np.float32)
    words = [address_of(x), x.strides[0], address_of(y), y.strides[0], address_of(weight), 64, float_word(1e-5), 0]
    step = {records.STEP_ROWS: 1, records.STEP_REPLICATED: 1}
    flags = records.FLAG_REPLICATED | records.FLAG_PRIVATE_OUTPUT
    run_kernel(KernelName.of("rowwise", "rmsnorm"), words, step, threads=4, flags=flags)
    np.testing.assert_array_equal(y, np.repeat(run_rmsnorm(x, weight, 1e-5, LEVELS_HERE[0], threads=1), 4, axis=0))
