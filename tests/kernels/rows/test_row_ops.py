"""Tests of all row-wise ops in one plan, lowered and run by a team, against NumPy on the same plan."""

from __future__ import annotations

import numpy as np
import pytest

from llmrun.model.plan import reference
from tests.support.kernels.row_ops_plan import TOKENS, row_ops_plan
from tests.support.kernels.runs import LEVELS_HERE
from tests.support.kernels.sequence_runs import run_steps

pytestmark = pytest.mark.push

SENTENCE = np.random.default_rng(0).integers(0, TOKENS, 40).astype(np.int32)


@pytest.mark.parametrize("level", LEVELS_HERE)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_plan_of_row_ops_means_what_its_twin_says(level: str, threads: int) -> None:
    found = run_steps(row_ops_plan(), [[(0, int(token)) for token in SENTENCE]], level=level, threads=threads)[0]
    expected = reference.exact(row_ops_plan(), SENTENCE)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_one_row_at_a_time_is_the_same_to_the_bit(threads: int) -> None:
    """In steps of one row, each thread keeps its own copy of the sums."""
    whole = run_steps(row_ops_plan(), [[(0, int(token)) for token in SENTENCE]])[0]
    single = run_steps(row_ops_plan(), [[(0, int(token))] for token in SENTENCE], threads=threads)[0]
    np.testing.assert_array_equal(single, whole)
