"""Tests that a sharded model gives bit-identical logits to a single file, on both backends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.backends.base import Backend, OpenOptions
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.formats.gguf.reader import open_gguf
from tests.support.backends.seam_contract import batch_of, rows
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.gguf.gguf_shards import split_by_gguf_py

pytestmark = pytest.mark.push

TOKENS = [int(token) for token in np.random.default_rng(0).integers(3, 290, 40)]


def logits_of(kind: type[CpuBackend] | type[LlamaBackend], path: Path) -> NDArray[np.float32]:
    with open_gguf(path) as file:
        backend: Backend = kind(file, OpenOptions(context_size=64, threads=1, gpu_layers=0))
        assert backend.info.file_bytes == file.file_bytes
    try:
        return backend.forward(batch_of(rows(0, 0, TOKENS))).logits
    finally:
        backend.close()


@pytest.mark.parametrize("kind", [CpuBackend, LlamaBackend])
@pytest.mark.parametrize("small_first", [False, True])
def test_logits_do_not_depend_on_the_number_of_files(
    tmp_path: Path, kind: type[CpuBackend] | type[LlamaBackend], small_first: bool
) -> None:
    whole = tiny_llama(tmp_path / "tiny.gguf", weight_type="Q4_1", tied=False, rope_scaling="llama3")
    first = split_by_gguf_py(whole, tmp_path, tensors_each=3, small_first=small_first)
    assert len(list(tmp_path.glob("split-*.gguf"))) > 4
    np.testing.assert_array_equal(logits_of(kind, first), logits_of(kind, whole))
