"""Tests of how the best of several samples is chosen."""

from __future__ import annotations

import pytest

from llmrun.cli.answers.samples import best_of_mean_logprob, best_of_vote


@pytest.mark.parametrize(
    ("texts", "complete", "index", "votes"),
    [
        (["a", "b", "b"], [0, 1, 2], 1, [1, 2, 2]),
        (["a", "b", "b\n", " a "], [0, 1, 2, 3], 0, [2, 2, 2, 2]),
        (["a", "b", "c"], [0, 1, 2], 0, [1, 1, 1]),
        (["a", "a", "b"], [2], 2, [0, 0, 1]),
    ],
)
def test_the_most_frequent_text_wins(texts: list[str], complete: list[int], index: int, votes: list[int]) -> None:
    best = best_of_vote(texts, complete)
    assert (best.index, best.votes) == (index, votes)


@pytest.mark.parametrize(
    ("means", "complete", "index"),
    [
        ([-2.0, -1.0, -1.0], [0, 1, 2], 1),
        ([-2.0, -1.0, None], [0, 2], 0),
        ([None, None], [0, 1], 0),
        ([float("-inf"), None], [0, 1], 0),
    ],
)
def test_the_highest_mean_wins(means: list[float | None], complete: list[int], index: int) -> None:
    assert best_of_mean_logprob(means, complete).index == index
