"""Tests of vectors and rankings of the CPU engine against llama.cpp's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from llmrun.base.types import Pooling
from tests.support.models.downloads import smollm2
from tests.support.models.embedding_results import cosines, random_texts, results, unit_vectors
from tests.support.models.llama_cpp_oracle import LlamaCppModel, requantize
from tests.support.models.tiny_encoders import TINY_ENCODERS, TINY_RERANKERS, tiny_encoder

pytestmark = pytest.mark.push


def check_quantized(path: Path, exact: Path, texts: Sequence[Sequence[int]], pooling: Pooling) -> None:
    """Check that the vectors are as near to those of the dequantized weights as llama.cpp's own.

    Both engines round activations to int8, in different places, so neither is exact.
    """
    expected, theirs = (unit_vectors(each, texts, pooling) for each in (exact, path))
    distance, their_distance = (
        1 - cosines(found, expected).mean() for found in (results(path, texts, pooling), theirs)
    )
    assert distance <= 1.5 * their_distance + 1e-5


@pytest.mark.parametrize("name", TINY_ENCODERS)
def test_vectors_point_where_llama_cpp_s_do(tmp_path: Path, name: str) -> None:
    row, texts = TINY_ENCODERS[name], random_texts(20, random.Random(1))
    pooling = Pooling.CLS if row.keys.get("pooling_type") == Pooling.CLS else Pooling.MEAN
    path = tiny_encoder(tmp_path, row)
    assert cosines(results(path, texts), unit_vectors(path, texts, pooling)).min() >= 0.9999


@pytest.mark.parametrize("name", TINY_ENCODERS)
def test_vectors_of_quantized_models_are_as_near_as_llama_cpp_s(tmp_path: Path, name: str) -> None:
    row = TINY_ENCODERS[name]
    path = tiny_encoder(tmp_path, row, "Q8_0")
    exact = requantize(path, tmp_path / "f32.gguf", "F32")
    check_quantized(path, exact, random_texts(20, random.Random(1)), Pooling.MEAN)


@pytest.mark.night
def test_the_last_token_s_vector_of_a_real_model_is_as_near_as_llama_cpp_s(tmp_path: Path) -> None:
    source = random.Random(2)
    texts = [[source.randrange(100, 40_000) for _ in range(n)] for n in (3, 9, 27, 81)]
    exact = requantize(smollm2(), tmp_path / "f32.gguf", "F32")
    check_quantized(smollm2(), exact, texts, Pooling.LAST)


@pytest.mark.parametrize("name", TINY_RERANKERS)
def test_200_lists_have_llama_cpp_s_order(tmp_path: Path, name: str) -> None:
    """Scores that differ by less than a hundredth of their range count as equal: llama.cpp's GELU is a table."""
    source = random.Random(3)
    path, documents = tiny_encoder(tmp_path, TINY_RERANKERS[name]), random_texts(60, source)
    with LlamaCppModel.oracle(path) as oracle:
        expected = np.array([oracle.pooled(document, Pooling.RANK)[0, 0] for document in documents])
    scores = np.concatenate(results(path, documents))
    least = np.ptp(expected) / 100
    for _ in range(200):
        chosen = source.sample(range(60), 10)
        ours = sorted(chosen, key=lambda document: -scores[document])
        for better, worse in pairwise(ours):
            assert expected[better] > expected[worse] - least
    assert np.corrcoef(scores, expected)[0, 1] > 0.9999
