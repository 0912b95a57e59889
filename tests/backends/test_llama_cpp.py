"""The llama.cpp backend keeps the promises of the seam."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrun.backends.base import Backend
from llmrun.backends.llama_cpp import LlamaBackend
from llmrun.gguf.reader import open_gguf
from tests.support.seam_contract import CONTEXT, FullCacheContract, SeamContract
from tests.support.tiny_models import tiny_model


def open_llama(path: Path, **options: object) -> LlamaBackend:
    with open_gguf(path) as file:
        return LlamaBackend(file, threads=1, **{"context_size": CONTEXT, "max_sequences": 1, **options})  # type: ignore[arg-type]


class TestSeam(SeamContract, FullCacheContract):
    exact = False  # llama.cpp chooses its order of sums by the size of the batch

    @pytest.fixture(autouse=True)
    def _model(self, tmp_path: Path) -> None:
        self.path = tiny_model(tmp_path, "F32")

    def open_backend(self, *, context_size: int, max_sequences: int) -> Backend:
        return open_llama(self.path, context_size=context_size, max_sequences=max_sequences)

    def open_with_capacity(self, capacity: int, *, context_size: int, max_sequences: int) -> Backend:
        return open_llama(self.path, context_size=256, cache_tokens=256, max_sequences=max_sequences)
