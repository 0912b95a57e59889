"""Tests of the predicted length of answers."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

import numpy as np
import pytest

from llmrun.jobs.batching.estimate.sampling import CutAnswer, generated_per_call


def test_answers_to_all_calls_are_exact() -> None:
    assert generated_per_call([10, 20, 60], [], 3) == (30, 30, 30)


def test_the_mean_of_a_sample_has_an_interval() -> None:
    found = generated_per_call([10, 20, 60, 30], [], 100)
    assert found.estimate == 30
    assert 0 <= found.low < 30 < found.high < math.inf


def test_cut_answers_are_between_what_they_have_and_their_limit() -> None:
    found = generated_per_call([10, 20], [CutAnswer(50, 100), CutAnswer(40, 50)], 4)
    assert (found.low, found.high) == (30, 45)
    assert found.low <= found.estimate <= found.high


def test_without_a_finished_answer_limits_are_assumed() -> None:
    assert generated_per_call([], [CutAnswer(5, 90), CutAnswer(7, 90)], 2) == (90, 6, 90)


@pytest.mark.push
def test_cut_answers_of_random_lengths_do_not_bias_the_estimate() -> None:
    """Answers that end with the same probability after each token have a mean that half of them does not reach."""
    lengths = np.random.default_rng(3).geometric(1 / 100, 4000)
    finished = [int(length) for length in lengths if length <= 60]
    cut = [CutAnswer(60, 4096) for length in lengths if length > 60]
    assert len(finished) < len(cut) * 1.2
    assert generated_per_call(finished, cut, 10**6).estimate == pytest.approx(100, rel=0.05)


def test_no_answer_is_an_error() -> None:
    with pytest.raises(ValueError, match="no answers"):
        generated_per_call([], [], 5)


def begun_until(end: int, lengths: Iterable[int]) -> list[int]:
    """Return the lengths of the answers that begin before a step, of which 16 run at a time, as in a sample."""
    ends, begun = [0] * 16, []
    for length in lengths:
        if ends[0] >= end:
            break
        begun.append(length)
        heapq.heapreplace(ends, ends[0] + length)
    return begun


@pytest.mark.night
@pytest.mark.parametrize("kind", ["exponential", "lognormal", "two lengths"])
def test_samples_of_limited_time_predict_their_batch(kind: str) -> None:
    """For about 95 % of batches, and without a bias toward short answers, because all begun answers finish."""
    random, size = np.random.default_rng(7), (150, 2000)
    batches = {
        "exponential": random.exponential(150, size),
        "lognormal": random.lognormal(4.5, 0.8, size),
        "two lengths": random.choice([10.0, 300.0], size),
    }
    inside, errors = 0, []
    for lengths in batches[kind]:
        batch = np.ceil(lengths).astype(int).tolist()
        mean = sum(batch) / len(batch)
        found = generated_per_call(begun_until(900, batch), [], len(batch))
        inside += found.low <= mean <= found.high
        errors.append(found.estimate / mean - 1)
    assert inside / 150 >= 0.9
    assert -0.02 < float(np.mean(errors)) < 0.04
