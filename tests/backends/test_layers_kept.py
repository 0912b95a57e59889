"""Which layers llama.cpp runs, and whether they keep values."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrun.backends.layers_kept import keeps_values, layers_of, layers_run
from llmrun.gguf.reader import open_gguf
from tests.support.gguf_files import tiny_llama
from tests.support.tiny_architectures import tiny_architecture


@pytest.mark.parametrize(("ahead", "run"), [(0, 2), (1, 1), (2, 2)])
def test_layers_that_predict_further_ahead_are_not_run_where_there_are_others(
    tmp_path: Path, ahead: int, run: int
) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf", weight_type="F32", extra={"llama.nextn_predict_layers": ahead})
    with open_gguf(path) as file:
        assert (layers_of(file), layers_run(file)) == (2, run)


@pytest.mark.parametrize(("name", "kept"), [("deepseek2", False), ("deepseek2 V2 Lite, older", True), ("qwen3", True)])
def test_values_are_kept_unless_they_are_part_of_keys(tmp_path: Path, name: str, kept: bool) -> None:
    with open_gguf(tiny_architecture(tmp_path, name)) as file:
        assert keeps_values(file) == kept
