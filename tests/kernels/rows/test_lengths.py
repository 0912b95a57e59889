"""Tests of the kernels that compare features with the length or the spread of their row, at every level."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.backends.cpu.lowering import float_word
from llmrun.base.compiled.kernel import KernelName
from llmrun.formats.layouts import records
from llmrun.formats.layouts.arena import address_of
from llmrun.model.plan.ops.norms import CutOffWords, MatchLengthWords, cut_off_reference, match_length_reference
from tests.support.kernels.runs import EPSILON, LEVELS_HERE, padded_rows, run_kernel, ulps

pytestmark = pytest.mark.push

EVERY_LEVEL = pytest.mark.parametrize("level", LEVELS_HERE)
ROWS = (1, 2, 3, 7, 8, 9, 17)
WIDTHS = (2, 16, 33, 64, 576, 1000)


def run_match_length(
    x: NDArray[np.float32], like: NDArray[np.float32], level: str, threads: int = 1
) -> NDArray[np.float32]:
    xs, likes = padded_rows(x), padded_rows(like)
    y = np.full_like(xs, np.nan)
    words = MatchLengthWords(
        x=address_of(xs),
        x_stride=xs.strides[0],
        like=address_of(likes),
        like_stride=likes.strides[0],
        out=address_of(y),
        out_stride=y.strides[0],
        width=x.shape[1],
    )
    name = KernelName.of("rows.lengths", "match_length")
    run_kernel(name, words, {records.STEP_ROWS: len(x)}, level=level, threads=threads)
    assert not y[:, x.shape[1] :].any(), "the padding of a row must stay zero"
    return y[:, : x.shape[1]]


def run_cut_off(x: NDArray[np.float32], deviations: float, level: str, threads: int = 1) -> NDArray[np.float32]:
    xs = padded_rows(x)
    y = np.full_like(xs, np.nan)
    words = CutOffWords(
        x=address_of(xs),
        x_stride=xs.strides[0],
        out=address_of(y),
        out_stride=y.strides[0],
        width=x.shape[1],
        deviations=float_word(deviations),
    )
    name = KernelName.of("rows.lengths", "cut_off")
    run_kernel(name, words, {records.STEP_ROWS: len(x)}, level=level, threads=threads)
    assert not y[:, x.shape[1] :].any(), "the padding of a row must stay zero"
    return y[:, : x.shape[1]]


def random_rows(rows: int, width: int, seed: int) -> NDArray[np.float32]:
    return (10 * np.random.default_rng(seed).standard_normal((rows, width))).astype(np.float32)


@EVERY_LEVEL
@pytest.mark.parametrize("rows", ROWS)
def test_matched_lengths_are_near_those_of_the_twin(level: str, rows: int) -> None:
    """Allow 6 units in the last place, because squares are added in another order."""
    for width in WIDTHS:
        x, like = random_rows(rows, width, 1), random_rows(rows, width, 2)
        actual = run_match_length(x, like, level, threads=1 + rows % 4)
        assert ulps(actual, match_length_reference(x, like)) <= 6


@EVERY_LEVEL
def test_rows_of_zeros_stay_zeros(level: str) -> None:
    x = np.zeros((2, 40), np.float32)
    x[1] = 1
    actual = run_match_length(x, np.full((2, 40), 3, np.float32), level)
    np.testing.assert_array_equal(actual, 3 * x)


@EVERY_LEVEL
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("deviations", [1.6448533535003662, -0.5])
def test_the_cutoff_is_near_that_of_the_twin(level: str, rows: int, deviations: float) -> None:
    """Allow 16 roundings relative to the largest feature. The mean is not 0, so padding in a sum would be far off."""
    for width in WIDTHS:
        x = random_rows(rows, width, 3) + np.float32(25)
        actual = run_cut_off(x, deviations, level, threads=1 + rows % 4)
        largest = np.abs(x).max(-1, keepdims=True)
        assert (np.abs(actual - cut_off_reference(x, deviations)) / (EPSILON * largest)).max() <= 16


@EVERY_LEVEL
def test_the_cutoff_of_whole_numbers_is_exact(level: str) -> None:
    """The mean is 5, the squares add up to 128, and the standard deviation of a sample of 33 is 2."""
    x = np.where(np.arange(33) % 2, 7, 3).astype(np.float32)[None]
    x[0, 0] = 5
    actual = run_cut_off(x, -1.5, level)
    np.testing.assert_array_equal(actual, x - 2)


@EVERY_LEVEL
def test_nan_passes_the_cutoff(level: str) -> None:
    x = np.ones((1, 20), np.float32)
    x[0, 3] = np.nan
    assert np.isnan(run_cut_off(x, 1.0, level)).all()
