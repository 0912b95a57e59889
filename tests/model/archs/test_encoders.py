"""Tests of every architecture that computes embeddings or scores against llama.cpp, over the table of tiny models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.base.errors import BadGGUF, UnsupportedModel
from llmrun.base.types import HIDDEN, Batch, Pooling
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.plan import reference
from llmrun.model.plan.ops import activations
from tests.model.archs.test_architectures import activation_in_a_table, distance, has_gelu
from tests.support.models.fidelity import plan_of
from tests.support.models.llama_cpp_oracle import LlamaCppModel
from tests.support.models.tiny_encoders import TINY_ENCODERS, TINY_RERANKERS, some_tokens, tiny_encoder


def twin_states(path: Path, tokens: list[int]) -> NDArray[np.float32]:
    return reference.exact_hidden(plan_of(path), np.array(tokens, np.int32))


def engine_states(path: Path, texts: list[list[int]], threads: int) -> list[NDArray[np.float32]]:
    """Return the hidden states of each text, from one batch."""
    with open_gguf(path) as file:
        backend = CpuBackend(file, OpenOptions(context_size=512, threads=threads, max_sequences=len(texts)))
    try:
        lengths = [len(text) for text in texts]
        rows = Batch(
            np.concatenate(texts).astype(np.int32),
            np.repeat(np.arange(len(texts), dtype=np.int32), lengths),
            np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
            np.full(sum(lengths), HIDDEN, np.uint8),
        )
        hidden = backend.forward(rows).hidden
        return np.split(hidden, np.cumsum(lengths)[:-1])
    finally:
        backend.close()


@pytest.mark.parametrize("name", TINY_ENCODERS)
def test_hidden_states_of_the_twin_are_llama_cpp_s(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow 5e-6 of their range, or 1e-3 with GELU, which ggml takes from a float16 table."""
    monkeypatch.setattr(activations, "activation_reference", activation_in_a_table)
    row = TINY_ENCODERS[name]
    path, tokens = tiny_encoder(tmp_path, row), some_tokens(row)
    with LlamaCppModel.oracle(path) as oracle:
        # Without pooling, llama.cpp applies the matrices of `dense` to each row.
        expected = oracle.pooled(tokens, Pooling.NONE)
    assert distance(twin_states(path, tokens), expected) <= (1e-3 if has_gelu(path) else 5e-6)


@pytest.mark.push
@pytest.mark.parametrize("name", TINY_ENCODERS)
def test_hidden_states_of_the_engine_are_llama_cpp_s_in_any_batch(tmp_path: Path, name: str) -> None:
    """Allow 1e-3 of their range, because keys and values are float16. The bits do not depend on the batch."""
    row = TINY_ENCODERS[name]
    path, tokens = tiny_encoder(tmp_path, row), some_tokens(row)
    with LlamaCppModel.oracle(path) as oracle:
        expected = oracle.pooled(tokens, Pooling.NONE)
    [alone] = engine_states(path, [tokens], threads=1)
    assert distance(alone, expected) <= 1e-3
    others = engine_states(path, [tokens[:5], tokens, tokens[::-1], tokens[3:40]], threads=2)
    np.testing.assert_array_equal(others[1], alone)
    [short] = engine_states(path, [tokens[:5]], threads=1)
    np.testing.assert_array_equal(others[0], short)


@pytest.mark.parametrize("name", TINY_RERANKERS)
def test_scores_of_the_twin_are_llama_cpp_s(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "activation_reference", activation_in_a_table)
    row = TINY_RERANKERS[name]
    path, tokens = tiny_encoder(tmp_path, row), some_tokens(row)
    with LlamaCppModel.oracle(path) as oracle:
        expected = oracle.pooled(tokens, Pooling.RANK)[0]
    states = twin_states(path, tokens)
    scores = states[-1] if name == "qwen3" else states[0]
    if name == "qwen3":  # llama.cpp computes the softmax, and llmrun's engine does so later
        scores = np.exp(scores) / np.exp(scores).sum()
    np.testing.assert_allclose(scores, expected, atol=1e-3)


SEEN = [(name, key) for name, row in TINY_ENCODERS.items() for key in row.keys if key not in row.unseen]


@pytest.mark.push
@pytest.mark.parametrize(("name", "key"), SEEN)
def test_what_an_encoder_s_row_sets_is_seen(tmp_path: Path, name: str, key: str) -> None:
    """Without the key, the hidden states must differ. So the tests above would fail if the key were ignored."""
    row = TINY_ENCODERS[name]
    tokens = some_tokens(row)
    with_it = twin_states(tiny_encoder(tmp_path, row), tokens)
    (tmp_path / "without").mkdir()
    try:
        without = twin_states(tiny_encoder(tmp_path / "without", row, without=key), tokens)
    except (BadGGUF, UnsupportedModel):
        return  # the key is required, or tensors depend on it
    assert distance(without, with_it) > 2e-3
