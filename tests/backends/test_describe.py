"""Tests of the description of a model from its file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.formats.gguf.reader import open_gguf
from tests.support.gguf.gguf_files import tiny_llama

pytestmark = pytest.mark.push


def test_tokens_never_to_be_written_are_those_of_the_vocabulary(tmp_path: Path) -> None:
    suppressed = {"tokenizer.ggml.suppress_tokens": np.array([7, -1, 3, 1 << 30], np.int32)}
    for extra, expected in ((suppressed, (7, 3)), ({}, ())):
        with open_gguf(tiny_llama(tmp_path / "tiny.gguf", weight_type="F32", extra=extra)) as file:
            backend = CpuBackend(file, OpenOptions(context_size=64, threads=1))
        assert backend.info.suppressed_tokens == expected
        backend.close()
