"""Tests of the predicted length of answers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llmrun.batching.estimate.answers import CutAnswer, generated_per_call


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
