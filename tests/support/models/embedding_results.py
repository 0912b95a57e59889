"""Vectors and scores of texts from a backend, and from llama.cpp itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmrun.backends.base import OpenOptions
from llmrun.backends.registry import open_backend
from llmrun.base.types import Pooling
from llmrun.engine.embedding import Embedder, EmbeddingJob, normalized
from llmrun.engine.slots import SequenceSlots
from tests.support.models.llama_cpp_oracle import LlamaCppModel

_TEXTS_AT_A_TIME = 16


def results(
    path: Path,
    texts: Sequence[Sequence[int]],
    pooling: Pooling | None = None,
    *,
    backend: str = "cpu",
    gpu_layers: int | str = 0,
) -> list[NDArray[np.float32]]:
    """Return the vectors or scores that llmrun computes. `pooling` replaces the model's own."""
    opened = open_backend(
        path,
        OpenOptions(
            backend,
            context_size=512,
            threads=2,
            max_sequences=_TEXTS_AT_A_TIME,
            kv_tokens="auto",
            gpu_layers=gpu_layers,
        ),
    )
    try:
        embedder = Embedder(opened, SequenceSlots(opened.kv, _TEXTS_AT_A_TIME), pooling)
        job = EmbeddingJob(texts, lambda job: None)
        embedder.add(job)
        while not embedder.idle:
            embedder.step()
        return job.results
    finally:
        opened.close()


def random_texts(count: int, source: random.Random) -> list[list[int]]:
    return [[source.randrange(3, 290) for _ in range(source.randint(3, 60))] for _ in range(count)]


def unit_vectors(path: Path, texts: Sequence[Sequence[int]], pooling: Pooling) -> NDArray[np.float32]:
    """Return llama.cpp's vectors."""
    with LlamaCppModel.oracle(path) as oracle:
        return np.array([normalized(oracle.pooled(text, pooling)[0]) for text in texts])


def cosines(
    some: Sequence[NDArray[np.float32]] | NDArray[np.float32], others: NDArray[np.float32]
) -> NDArray[np.float32]:
    found: NDArray[np.float32] = (np.array(some) * others).sum(1)
    return found
