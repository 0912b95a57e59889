"""Tests of the normalization kernels against their NumPy twins, at every level, with odd widths and unusual rows."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.backends.cpu.lowering import float_word
from llmrun.base.compiled.kernel import KernelName
from llmrun.formats.layouts import records
from llmrun.formats.layouts.arena import address_of
from llmrun.model.plan.ops.norms import NormWords, layernorm_reference, rmsnorm_reference
from tests.support.kernels.runs import EPSILON, LEVELS_HERE, padded_rows, run_kernel, ulps

pytestmark = pytest.mark.push

EVERY_LEVEL = pytest.mark.parametrize("level", LEVELS_HERE)
ROWS = (1, 2, 3, 7, 8, 9, 17)
WIDTHS = (1, 16, 33, 64, 576, 1000)


def norm_words(
    x: NDArray[np.float32], y: NDArray[np.float32], weight: NDArray[np.float32], width: int, epsilon: float
) -> NormWords:
    return NormWords(
        x=address_of(x),
        x_stride=x.strides[0],
        out=address_of(y),
        out_stride=y.strides[0],
        weight=address_of(weight),
        width=width,
        epsilon=float_word(epsilon),
        gathers=0,
        heads=1,
        weight_step=0,
        bias=0,
    )


def run_norm(
    x: NDArray[np.float32],
    weight: NDArray[np.float32],
    epsilon: float,
    level: str,
    threads: int,
    *,
    bias: NDArray[np.float32] | None = None,
    wanted: NDArray[np.int32] | None = None,
) -> NDArray[np.float32]:
    """Run layernorm if there is a bias, else rmsnorm.

    A weight narrower than x normalizes each head, and one of float32[groups, features] each group.
    """
    width = weight.shape[-1]
    padded, weights = padded_rows(x), padded_rows(weight.reshape(-1, width))
    biases = padded_rows(weight.reshape(1, -1) if bias is None else bias[None])
    rows = len(x) if wanted is None else len(wanted)
    y = np.full((rows, padded.shape[1]), np.nan, np.float32)
    words = norm_words(padded, y, weights, width, epsilon)._replace(
        gathers=int(wanted is not None),
        heads=x.shape[1] // width,
        weight_step=weights.strides[0] if weight.ndim > 1 else 0,
        bias=address_of(biases),
    )
    step = {records.STEP_ROWS: rows}
    if wanted is not None:
        step[records.STEP_WANTED_ROWS] = address_of(wanted)
    name = KernelName.of("rows.norms", "rmsnorm" if bias is None else "layernorm")
    run_kernel(name, words, step, level=level, threads=threads)
    assert not y[:, x.shape[1] :].any(), "the padding of a row must stay zero"
    return y[:, : x.shape[1]]


def random_rows(rows: int, width: int) -> NDArray[np.float32]:
    return np.random.default_rng(width).standard_normal((rows, width)).astype(np.float32) * np.float32(10)


def random_weight(width: int) -> NDArray[np.float32]:
    return (1 + 0.1 * np.random.default_rng(width).standard_normal(width)).astype(np.float32)


# --- rmsnorm ----------------------------------------------------------------------------------------------------------


@EVERY_LEVEL
@pytest.mark.parametrize("rows", ROWS)
def test_rmsnorm_is_near_its_twin(level: str, rows: int) -> None:
    """Allow 6 units in the last place (at most 4 were measured), because sums of squares are added in another order."""
    for width in WIDTHS:
        x, weight = random_rows(rows, width), random_weight(width)
        actual = run_norm(x, weight, 1e-5, level, threads=1 + rows % 4)
        assert ulps(actual, rmsnorm_reference(x, weight, 1e-5)) <= 6


@EVERY_LEVEL
def test_rmsnorm_of_whole_squares_is_exact(level: str) -> None:
    """These sums are exact in any order: the mean of 64 squares of 3 is 9."""
    x = np.where(np.arange(64) % 2, 3, -3).astype(np.float32)[None]
    actual = run_norm(x, np.full(64, 6, np.float32), 0.0, level, threads=1)
    np.testing.assert_array_equal(actual, x * (np.float32(1) / np.float32(3)) * np.float32(6))


@EVERY_LEVEL
def test_rmsnorm_of_zeros_is_zero(level: str) -> None:
    assert not run_norm(np.zeros((3, 40), np.float32), np.ones(40, np.float32), 1e-5, level, threads=2).any()


@EVERY_LEVEL
@pytest.mark.parametrize(("heads", "head_size"), [(1, 16), (3, 48), (9, 64)])
def test_each_head_is_normalized_as_a_row_of_its_own(level: str, heads: int, head_size: int) -> None:
    x, weight = random_rows(5, heads * head_size), random_weight(head_size)
    of_heads = run_norm(x, weight, 1e-6, level, threads=2)
    of_rows = run_norm(x.reshape(-1, head_size), weight, 1e-6, level, threads=2)
    np.testing.assert_array_equal(of_heads, of_rows.reshape(x.shape))


@EVERY_LEVEL
@pytest.mark.parametrize(("groups", "features"), [(1, 16), (3, 48), (8, 64)])
def test_each_group_is_normalized_with_its_own_weight(level: str, groups: int, features: int) -> None:
    x, weight = random_rows(5, groups * features), random_weight(groups * features).reshape(groups, features)
    of_groups = run_norm(x, weight, 1e-6, level, threads=2).reshape(5, groups, features)
    for group in range(groups):
        part = np.ascontiguousarray(x.reshape(5, groups, features)[:, group])
        np.testing.assert_array_equal(of_groups[:, group], run_norm(part, weight[group], 1e-6, level, threads=1))
    assert ulps(of_groups, rmsnorm_reference(x.reshape(5, groups, features), weight, 1e-6)) <= 6


# --- layernorm --------------------------------------------------------------------------------------------------------


@EVERY_LEVEL
@pytest.mark.parametrize("rows", ROWS)
def test_layernorm_is_near_its_twin(level: str, rows: int) -> None:
    """Allow 16 roundings relative to the row's largest feature, because cancelled terms have no meaningful last place.

    The mean is not 0, so a variance that includes the padding would be far off.
    """
    for width in WIDTHS:
        x, weight = random_rows(rows, width) + np.float32(25), random_weight(width)
        bias = np.random.default_rng(rows).standard_normal(width).astype(np.float32)
        actual = run_norm(x, weight, 1e-5, level, threads=1 + rows % 4, bias=bias)
        deviation = np.sqrt(x.var(-1, dtype=np.float64, keepdims=True) + 1e-5)
        parts = np.abs(weight) * np.abs(x).max(-1, keepdims=True) / deviation + np.abs(bias)
        assert (np.abs(actual - layernorm_reference(x, weight, bias, 1e-5)) / (EPSILON * parts)).max() <= 16


@EVERY_LEVEL
def test_layernorm_of_whole_numbers_is_exact(level: str) -> None:
    """Uses 33 features, which end within a vector. The mean is 5, all squares but one are 4, and the variance is 128 /
    33.
    """
    x = np.where(np.arange(33) % 2, 7, 3).astype(np.float32)[None]
    x[0, 0] = 5
    actual = run_norm(x, np.ones(33, np.float32), 4 - 128 / 33, level, threads=1, bias=np.full(33, 10, np.float32))
    assert actual[0, :3].tolist() == [10, 11, 9]


# --- both norms ------------------------------------------------------------------------------------------------------


@EVERY_LEVEL
@pytest.mark.parametrize("bias", [None, np.ones(48, np.float32)], ids=["rmsnorm", "layernorm"])
def test_the_wanted_rows_are_gathered(level: str, bias: NDArray[np.float32] | None) -> None:
    x, weight = random_rows(9, 48), np.ones(48, np.float32)
    wanted = np.array([1, 4, 8], np.int32)
    gathered = run_norm(x, weight, 1e-5, level, threads=2, bias=bias, wanted=wanted)
    np.testing.assert_array_equal(gathered, run_norm(x, weight, 1e-5, level, threads=1, bias=bias)[wanted])


def test_in_a_step_of_one_row_every_thread_reads_and_writes_its_own_copy() -> None:
    weight, y = np.ones(64, np.float32), np.zeros((4, 64), np.float32)
    x = random_rows(4, 64)
    step = {records.STEP_ROWS: 1, records.STEP_REPLICATED: 1}
    flags = records.FLAG_REPLICATED | records.FLAG_PRIVATE_OUTPUT
    words = norm_words(x, y, weight, 64, 1e-5)
    alone = run_norm(x, weight, 1e-5, LEVELS_HERE[0], threads=1)
    run_kernel(KernelName.of("rows.norms", "rmsnorm"), words, step, threads=4, flags=flags)
    np.testing.assert_array_equal(y, np.repeat(alone[:1], 4, axis=0))
    flags |= records.FLAG_PRIVATE_INPUT
    run_kernel(KernelName.of("rows.norms", "rmsnorm"), words, step, threads=4, flags=flags)
    np.testing.assert_array_equal(y, alone)
