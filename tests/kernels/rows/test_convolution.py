"""Tests of the short convolution: bit-identical to NumPy on the whole sequence, across chunks, batches and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.model.plan.ops.convolution import convolution_reference
from llmrun.model.plan.plan import Plan
from tests.support.kernels.runs import LEVELS_HERE, matrix_of
from tests.support.kernels.sequence_runs import Rows, run_steps

pytestmark = pytest.mark.push

WIDTH = 48
LENGTH = 75  # positions, in three blocks
INPUTS = np.random.default_rng(1).standard_normal((2 * LENGTH, 3 * WIDTH)).astype(np.float32)


def weights(taps: int) -> NDArray[np.float32]:
    return np.random.default_rng(taps).standard_normal((WIDTH, taps)).astype(np.float32)


def convolved(
    steps: Sequence[Rows], *, taps: int = 3, level: str = LEVELS_HERE[0], threads: int = 2
) -> dict[int, NDArray[np.float32]]:
    """Run two convolution layers on the same input, so that mixing up their states would show.

    Token i is row i of INPUTS.
    """
    plan = Plan()
    x = plan.embed(matrix_of("f32", INPUTS, "inputs"))
    first, second = plan.convolve(x, weights(taps)), plan.convolve(x, -2 * weights(taps))
    plan.add(second, to=first)
    plan.output(first, matrix_of("f32", np.eye(WIDTH, dtype=np.float32)))
    return run_steps(plan, steps, level=level, threads=threads)


def expected(tokens: Sequence[int], taps: int = 3) -> NDArray[np.float32]:
    x = INPUTS[list(tokens)]
    return convolution_reference(x, weights(taps)) + convolution_reference(x, -2 * weights(taps))


def cut(tokens: Sequence[int], at: Sequence[int]) -> list[Rows]:
    return [[(0, token) for token in tokens[start:end]] for start, end in pairwise(at)]


@pytest.mark.parametrize("level", LEVELS_HERE)
@pytest.mark.parametrize("taps", [1, 2, 3, 5])
def test_a_whole_sequence_is_convolved_as_by_its_twin(level: str, taps: int) -> None:
    steps = cut(range(LENGTH), [0, LENGTH])
    np.testing.assert_array_equal(convolved(steps, taps=taps, level=level)[0], expected(range(LENGTH), taps))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "at", [[0, 1, 2, 3, 10, 31, 32, 33, 34, 70, LENGTH], [*range(LENGTH + 1)], [0, 40, *range(41, LENGTH + 1)]]
)
def test_a_sequence_in_any_chunks_is_the_same(at: list[int], threads: int) -> None:
    found = convolved(cut(range(LENGTH), at), threads=threads)
    np.testing.assert_array_equal(found[0], expected(range(LENGTH)))


def test_sequences_of_one_batch_keep_apart() -> None:
    """Interleaves rows of two sequences in different pieces, including next to each other's last rows."""
    tokens = {0: list(range(LENGTH)), 1: list(range(LENGTH, 2 * LENGTH))}
    left = {seq: list(of) for seq, of in tokens.items()}
    random = np.random.default_rng(2)
    steps = []
    while any(left.values()):
        counts = [min(len(of), int(random.integers(1, 9))) for of in left.values()]
        rows = random.permutation(np.repeat(list(left), counts)).tolist()
        steps.append([(seq, left[seq].pop(0)) for seq in rows])
    found = convolved(steps, threads=3)
    for seq, of in tokens.items():
        np.testing.assert_array_equal(found[seq], expected(of))
