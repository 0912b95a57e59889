"""Tests of vectors and scores that llama.cpp's backend computes, against llama.cpp's own pooling."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmrun.backends.base import OpenOptions
from llmrun.backends.registry import open_backend
from llmrun.base.errors import UnsupportedModel, UsageError
from llmrun.base.types import Pooling
from llmrun.engine.embedding import InputReader, pooling_of
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.archs.parts.encoders import is_encoder
from tests.support.backends.seam_contract import batch_of, rows
from tests.support.models.embedding_results import cosines, random_texts, results, unit_vectors
from tests.support.models.fidelity import plan_of
from tests.support.models.llama_cpp_oracle import LlamaCppModel
from tests.support.models.tiny_encoders import (
    LLAMA_ENCODERS,
    REFUSED,
    TINY_ENCODERS,
    TINY_RERANKERS,
    tiny_encoder,
)

pytestmark = pytest.mark.push

OPTIONS = OpenOptions("llama", context_size=256, threads=1, gpu_layers=0, max_sequences=4)
ENCODERS = TINY_ENCODERS | LLAMA_ENCODERS
XLM_R = "nomic-bert-moe"  # the name of llama.cpp's file with the vocabulary of XLM-RoBERTa


@pytest.mark.parametrize("name", ENCODERS)
def test_vectors_are_llama_cpp_s(tmp_path: Path, name: str) -> None:
    row, texts = ENCODERS[name], random_texts(20, random.Random(1))
    pooling = Pooling.CLS if row.keys.get("pooling_type") == Pooling.CLS else Pooling.MEAN
    path = tiny_encoder(tmp_path, row)
    assert cosines(results(path, texts, backend="llama"), unit_vectors(path, texts, pooling)).min() >= 0.99999


@pytest.mark.parametrize("name", TINY_RERANKERS)
def test_scores_are_llama_cpp_s(tmp_path: Path, name: str) -> None:
    """The causal reranker is read in several passes, because some documents have more rows than a pass."""
    path, documents = tiny_encoder(tmp_path, TINY_RERANKERS[name]), random_texts(20, random.Random(2))
    documents.append([9] * 150)
    with LlamaCppModel.oracle(path) as oracle:
        expected = np.array([oracle.pooled(document, Pooling.RANK)[0, 0] for document in documents])
    scores = np.concatenate(results(path, documents, backend="llama"))
    np.testing.assert_allclose(scores, expected, atol=0.005 * np.ptp(expected))


def test_auto_leaves_models_to_llama_cpp_that_our_engine_refuses(tmp_path: Path) -> None:
    backend = open_backend(tiny_encoder(tmp_path, LLAMA_ENCODERS["jina-bert-v2"]), replace(OPTIONS, backend="auto"))
    try:
        assert backend.info.backend == "llama"
        assert not backend.info.has_logits
        assert pooling_of(backend.info) is Pooling.MEAN
    finally:
        backend.close()


@pytest.mark.night
def test_unigram_texts_and_pairs_have_llama_server_s_tokens(tmp_path: Path) -> None:
    backend = open_backend(tiny_encoder(tmp_path, TINY_RERANKERS["bert"], vocabulary=XLM_R), OPTIONS)
    try:
        reader = InputReader(backend.info, backend.tokenizer, "use --truncate")
        assert reader.tokens_of("Hello world", "text 1", truncate=False) == [0, 35378, 8999, 2]
        assert reader.pair_of("Hello", "world", "text 1", truncate=False) == [0, 35378, 2, 8999, 2]
    finally:
        backend.close()


def test_encoders_give_no_logits_and_keep_nothing(tmp_path: Path) -> None:
    backend = open_backend(tiny_encoder(tmp_path, TINY_ENCODERS["bert"]), replace(OPTIONS, saves_state=True))
    try:
        assert (backend.info.kv_bytes, backend.kv.key) == (0, "")
        with pytest.raises(ValueError, match="no logits"):
            backend.forward(batch_of(rows(0, 0, [5, 6])))
        assert [backend.kv.copy(0, 1, 2), backend.kv.truncate(0, 1), backend.kv.free_blocks] == [0, 0, 256]
    finally:
        backend.close()


def test_what_llama_cpp_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only 512 positions, fewer than a context of 1,024"):
        open_backend(tiny_encoder(tmp_path, TINY_ENCODERS["bert"]), replace(OPTIONS, context_size=1024))
    headless = replace(TINY_RERANKERS["qwen3"], once="")
    for backend in ("llama", "cpu"):
        with pytest.raises(UnsupportedModel, match=r"no matrix cls or cls\.output has 2 rows"):
            open_backend(tiny_encoder(tmp_path, headless), replace(OPTIONS, backend=backend))


@pytest.mark.parametrize(("name", "words"), [("t5", "an encoder and a decoder"), ("dream", "no KV cache in llama.cpp")])
def test_models_of_other_kinds_are_refused(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"model not supported: .*: {name} has {words}"):
        open_backend(tiny_encoder(tmp_path, REFUSED[name]), OPTIONS)


@pytest.mark.parametrize("name", TINY_ENCODERS)
def test_headers_and_plans_agree_on_encoders(tmp_path: Path, name: str) -> None:
    path = tiny_encoder(tmp_path, TINY_ENCODERS[name])
    with open_gguf(path) as file:
        assert is_encoder(file) is not plan_of(path).is_causal
    path = tiny_encoder(tmp_path, TINY_RERANKERS["qwen3"])
    with open_gguf(path) as file:
        assert not is_encoder(file)
