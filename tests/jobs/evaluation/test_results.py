"""Tests of summarizing scores."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llmrun.jobs.evaluation.measuring import PERCENTILES, Scores, summarized


def chunk(surprise: list[float], base: list[float], divergence: list[float], agrees: list[bool]) -> Scores:
    return Scores(np.array(surprise), np.array(base), np.array(divergence), np.array(agrees))


def random_chunks(count: int, *, scored: int = 50, seed: int = 0) -> list[Scores]:
    random = np.random.default_rng(seed)
    chunks = []
    for _ in range(count):
        base = random.exponential(2, scored) + random.normal(0, 0.5)
        surprise = base + random.normal(0.02, 0.1, scored)
        chunks.append(Scores(surprise, base, random.exponential(0.01, scored), random.random(scored) < 0.95))
    return chunks


def test_the_figures_are_means_over_all_scored_tokens() -> None:
    chunks = [chunk([1, 2], [1, 1], [0.1, 0.3], [True, False]), chunk([3, 4], [2, 2], [0.0, 0.2], [True, True])]
    found = summarized(chunks)
    assert (found.chunks, found.scored) == (2, 4)
    assert found.model.value.estimate == pytest.approx(math.exp(2.5))
    assert found.base is not None
    assert found.comparison is not None
    assert found.base.value.estimate == pytest.approx(math.exp(1.5))
    assert found.comparison.ratio.estimate == pytest.approx(math.e)
    assert found.comparison.divergence.estimate == pytest.approx(0.15)
    assert found.comparison.maximum == 0.3
    assert found.comparison.same_top.estimate == 0.75
    assert found.comparison.percentiles[PERCENTILES.index(50)] == pytest.approx(0.15)


def test_the_error_of_llama_perplexity_assumes_independent_tokens() -> None:
    found = summarized([chunk([1, 2, 3, 4], [], [], [])]).model
    assert found.token_error == pytest.approx(math.exp(2.5) * math.sqrt(1.25 / 3))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_chunks_have_no_intervals(count: int) -> None:
    found = summarized(random_chunks(count)).comparison
    assert found is not None
    assert [each.high for each in (found.divergence, found.same_top, found.ratio)] == [math.inf] * 3


def test_four_chunks_have_an_interval() -> None:
    found = summarized(random_chunks(4)).comparison
    assert found is not None
    assert 0.8 < found.ratio.low < found.ratio.high < 1.3
    assert math.isfinite(found.same_top.low)


def test_the_ratio_is_much_more_precise_than_the_perplexities() -> None:
    """It is computed from pairs, and both models find the same chunks hard."""
    found = summarized(random_chunks(20))
    assert found.comparison is not None
    assert found.base is not None
    spread = [value.high / value.low - 1 for value in (found.model.value, found.base.value, found.comparison.ratio)]
    assert spread[2] < 0.1 * min(spread[:2])
    assert found.comparison.ratio.low < math.exp(0.02) < found.comparison.ratio.high


@pytest.mark.push
def test_intervals_cover_the_true_values() -> None:
    inside = np.zeros(2)
    for seed in range(100):
        found = summarized(random_chunks(12, seed=seed)).comparison
        assert found is not None
        inside += [
            found.divergence.low <= 0.01 <= found.divergence.high,
            found.same_top.low <= 0.95 <= found.same_top.high,
        ]
    assert (inside >= 88).all(), inside
