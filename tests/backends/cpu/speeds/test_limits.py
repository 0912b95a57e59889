"""Tests that the kernels that measure the machine's limits do all the work that is counted."""

from __future__ import annotations

import numpy as np
import pytest

from llmrun.backends.cpu.speeds import measured
from llmrun.formats.layouts.arena import address_of, allocate
from llmrun.formats.layouts.records import ReadWords, independent_sums
from llmrun.kernels.code.dots import multiplies_pairs
from tests.support.kernels.runs import LEVELS_HERE, run_kernel

pytestmark = pytest.mark.push


@pytest.mark.parametrize("level", LEVELS_HERE)
@pytest.mark.parametrize(("streams", "ahead"), [(1, 0), (4, 0), (4, 4096)])
def test_reading_touches_every_line_once(level: str, streams: int, ahead: int) -> None:
    memory = allocate(12 * 4096, "lines of a test").view(np.int32).reshape(-1, 16)
    memory[:] = np.random.default_rng(1).integers(-(2**31), 2**31, memory.shape)
    result = allocate(2 * 64, "results of a test").view(np.int32).reshape(2, 16)
    words = ReadWords(
        address_of(memory), 12, chunk_bytes=4096, results=address_of(result), streams=streams, ahead=ahead
    )
    run_kernel(measured.READ, words, {}, level=level, threads=2)
    assert (result[0] ^ result[1] == np.bitwise_xor.reduce(memory)).all()


@pytest.mark.parametrize("level", LEVELS_HERE)
def test_multiplying_makes_every_product(level: str) -> None:
    """Weights are 4 bits, so 16-bit sums do not overflow at any level. Round r multiplies by the r-th four bytes."""
    n_sums, rounds = independent_sums(level), 300
    weights = allocate(64 * n_sums, "weights of a test").reshape(n_sums, 16, 4)
    weights[:] = np.random.default_rng(2).integers(0, 16, weights.shape)
    result = allocate(64 * n_sums, "results of a test").view(np.int32).reshape(n_sums, 16)
    run_kernel(measured.MULTIPLY, [rounds, address_of(weights), address_of(result)], {}, level=level)
    activations = np.arange(rounds, dtype=np.int32).view(np.int8).reshape(rounds, 4).sum(0, dtype=np.int64)
    if multiplies_pairs(level):  # the weights are 8 columns of 8 outputs, and each product counts for two rows
        products = (weights.reshape(n_sums, 8, 8).astype(np.int64) * np.tile(activations, 2)).sum(-1).repeat(2, -1)
    else:
        products = (weights.astype(np.int64) * activations).sum(-1)
    expected = weights.view(np.int32)[..., 0] + products
    assert (result == expected).all()


def test_both_limits_are_rates_of_a_computer() -> None:
    here = measured.MachineLimits(1, memory_bytes=1 << 26)
    assert 1e8 < here.read_bandwidth() < 1e13
    assert 1e8 < here.multiply_rate() < 1e14
