"""Every architecture and variant means what llama.cpp says: one walk over the table of tiny models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.archs.registry import ARCHITECTURES, architecture_of
from llmrun.gguf.reader import open_gguf
from llmrun.kernels import reference
from tests.support.llama_cpp_oracle import LlamaCppModel
from tests.support.tiny_architectures import TINY_ARCHITECTURES, tiny_architecture


def tokens_of(name: str) -> NDArray[np.int32]:
    return np.random.default_rng(0).integers(3, 290, TINY_ARCHITECTURES[name].tokens).astype(np.int32)


def twin_logits(path: Path, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    with open_gguf(path) as file:
        architecture = architecture_of(file)
        return reference.exact(architecture.plan(file, architecture.check(file)), tokens)


def distance(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """The largest difference, as a share of the logits' spread."""
    return float(np.abs(actual - expected).max() / np.ptp(expected))


@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_an_architecture_means_what_llama_cpp_says(tmp_path: Path, name: str) -> None:
    path, tokens = tiny_architecture(tmp_path, name), tokens_of(name)
    with LlamaCppModel.oracle(path) as oracle:
        seen = distance(twin_logits(path, tokens), oracle.logits(tokens.tolist()))
    print(f"DIST {name}: {seen:.2e}")
    assert seen <= 1e-3


def test_every_architecture_has_a_row() -> None:
    assert {row.architecture for row in TINY_ARCHITECTURES.values()} >= set(ARCHITECTURES)
