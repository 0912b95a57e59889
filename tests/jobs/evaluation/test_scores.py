"""Tests of the arithmetic on logits, against the formulas in extended precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from llmrun.jobs.evaluation.measuring import Scores, scores_of, scores_of_two

logits = arrays(np.float32, (3, 17), elements=st.floats(-80, 80, width=32))


def log_probabilities(rows: NDArray[np.float32]) -> NDArray[np.longdouble]:
    exact = rows.astype(np.longdouble)
    result: NDArray[np.longdouble] = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
    return result


@pytest.mark.push
@given(logits, logits, arrays(np.int32, 3, elements=st.integers(0, 16)))
def test_scores_are_their_definitions(
    model: NDArray[np.float32], base: NDArray[np.float32], following: NDArray[np.int32]
) -> None:
    q, p = log_probabilities(model), log_probabilities(base)
    found = scores_of_two(model, base, following)
    rows = np.arange(3)
    assert found.surprise == pytest.approx((-q[rows, following]).astype(np.float64), rel=1e-12, abs=1e-12)
    assert found.base == pytest.approx((-p[rows, following]).astype(np.float64), rel=1e-12, abs=1e-12)
    expected = (np.exp(p) * (p - q)).sum(axis=1)
    assert found.divergence == pytest.approx(expected.astype(np.float64), rel=1e-10, abs=1e-12)
    assert found.agrees.tolist() == (model.argmax(axis=1) == base.argmax(axis=1)).tolist()
    assert scores_of(model, following).surprise.tolist() == found.surprise.tolist()


@given(logits)
def test_a_model_does_not_differ_from_itself(model: NDArray[np.float32]) -> None:
    found = scores_of_two(model, model.copy(), np.zeros(3, np.int32))
    assert found.divergence.tolist() == [0, 0, 0]
    assert found.agrees.all()


def test_the_divergence_is_taken_under_the_base() -> None:
    fair, bent = np.log(np.array([[[0.5, 0.5]], [[0.9, 0.1]]], np.float32))
    under_fair = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    under_bent = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    following = np.zeros(1, np.int32)
    assert scores_of_two(bent, fair, following).divergence == pytest.approx([under_fair], rel=1e-6)
    assert scores_of_two(fair, bent, following).divergence == pytest.approx([under_bent], rel=1e-6)


def test_tiny_divergences_are_exact() -> None:
    random = np.random.default_rng(0)
    base = random.standard_normal((3, 1000)).astype(np.float32)
    noise = (1e-4 * random.standard_normal(base.shape)).astype(np.float32)
    # To second order, the divergence is half the variance of the change, here 5e-9.
    found = scores_of_two(base + noise, base, np.zeros(3, np.int32)).divergence
    assert found == pytest.approx(5e-9, rel=0.2)


@pytest.mark.parametrize("which", ["model", "base"])
def test_nan_is_not_hidden(which: str) -> None:
    good, bad = np.zeros((1, 4), np.float32), np.array([[0, np.nan, 0, 0]], np.float32)
    found = (
        scores_of_two(bad, good, np.zeros(1, np.int32))
        if which == "model"
        else scores_of_two(good, bad, np.zeros(1, np.int32))
    )
    assert np.isnan(found.divergence).all()
    assert np.isnan(found.surprise if which == "model" else found.base).all()


def test_scores_are_joined_in_order() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    base, following = rows[:, ::-1], np.array([0, 1, 2, 0], np.int32)
    whole = scores_of_two(rows, base, following)
    parts = [scores_of_two(rows[part], base[part], following[part]) for part in (slice(0, 1), slice(1, 4))]
    for one, other in zip(whole, Scores.joined(parts), strict=True):
        assert one.tolist() == other.tolist()
