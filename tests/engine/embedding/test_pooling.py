"""Tests of how hidden states become vectors and scores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from llmrun.base.errors import UsageError
from llmrun.base.types import ModelInfo, Pooling
from llmrun.engine.embedding import cut_to, first_wanted, normalized, pooled, pooling_of, score_of
from tests.support.protocol.answers import FACTS

floats = st.floats(-1e3, 1e3, width=32)


def info(*, has_logits: bool, **keys: object) -> ModelInfo:
    metadata = {f"bert.{key}": value for key, value in keys.items()}
    return replace(FACTS.info, architecture="bert", has_logits=has_logits, metadata=metadata)


@pytest.mark.parametrize("pooling", [Pooling.MEAN, Pooling.CLS, Pooling.LAST, Pooling.RANK])
def test_the_file_names_the_pooling(pooling: Pooling) -> None:
    assert pooling_of(info(has_logits=False, pooling_type=int(pooling))) is pooling


@pytest.mark.parametrize("keys", [{}, {"pooling_type": 0}, {"pooling_type": 77}, {"pooling_type": "x"}])
def test_other_files_get_the_usual_pooling(keys: dict[str, object]) -> None:
    assert pooling_of(info(has_logits=True, **keys)) is Pooling.LAST
    assert pooling_of(info(has_logits=False, **keys)) is Pooling.MEAN


@pytest.mark.parametrize(
    ("pooling", "is_causal", "positions"),
    [
        (Pooling.MEAN, True, [0, 1, 2, 3]),
        (Pooling.CLS, True, [0]),
        (Pooling.LAST, False, [3]),
        (Pooling.RANK, True, [3]),
        (Pooling.RANK, False, [0]),
    ],
)
def test_only_the_needed_hidden_states_are_wanted(pooling: Pooling, is_causal: bool, positions: list[int]) -> None:
    assert list(range(4))[first_wanted(pooling, 4, is_causal=is_causal)] == positions


@pytest.mark.push
@given(arrays(np.float32, st.tuples(st.integers(1, 9), st.integers(1, 9)), elements=floats))
def test_the_mean_of_hidden_states_is_exact(hidden: np.ndarray) -> None:
    np.testing.assert_allclose(pooled(hidden), hidden.astype(np.float64).mean(0), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(pooled(hidden[:1]), hidden[0])


@pytest.mark.push
@given(arrays(np.float32, st.integers(1, 40), elements=floats))
def test_vectors_have_length_1_and_their_direction(vector: np.ndarray) -> None:
    found = normalized(vector)
    length = np.linalg.norm(vector.astype(np.float64))
    assert np.linalg.norm(found) == pytest.approx(1.0 if length else 0.0, abs=1e-5)
    np.testing.assert_allclose(found * length, vector, rtol=1e-4, atol=1e-30)


def test_dimensions_are_the_first_ones() -> None:
    vector = np.arange(8, dtype=np.float32)
    assert cut_to(vector, 3).tolist() == [0, 1, 2]
    assert cut_to(vector, None) is vector
    for wrong in (0, 9, -1):
        with pytest.raises(UsageError, match=rf"must be 1 to 8.*not {wrong}"):
            cut_to(vector, wrong)


def test_a_score_is_a_logit_or_the_probability_of_the_first_label() -> None:
    assert score_of(np.array([-2.5], np.float32)) == -2.5
    assert score_of(np.array([1e4, 1e4], np.float32)) == 0.5
    assert score_of(np.array([np.log(3), 0], np.float32)) == pytest.approx(0.75)
