"""Tests of which layers llama.cpp runs, and which of them store a state or cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrun.backends.sizing import layers_of, layers_run, storing_layers
from llmrun.base.errors import BadGGUF
from llmrun.formats.gguf.reader import open_gguf
from tests.support.gguf.gguf_files import gguf_about_attention, tiny_llama


@pytest.mark.parametrize(("ahead", "run"), [(0, 2), (1, 1), (2, 2)])
def test_layers_that_predict_further_ahead_are_not_run_where_there_are_others(
    tmp_path: Path, ahead: int, run: int
) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf", weight_type="F32", extra={"llama.nextn_predict_layers": ahead})
    with open_gguf(path) as file:
        assert (layers_of(file), layers_run(file)) == (2, run)


@pytest.mark.parametrize(
    ("architecture", "shared", "expected"),
    [("llama", {}, 30), ("gemma4", {}, 30), ("gemma4", {"shared_kv_layers": 18}, 12), ("gemma3n", {}, 20)],
)
def test_the_last_layers_may_keep_nothing(
    tmp_path: Path, architecture: str, shared: dict[str, int], expected: int
) -> None:
    with gguf_about_attention(tmp_path, architecture, 30, **shared) as file:
        assert storing_layers(file) == expected


def test_layers_that_are_not_run_keep_nothing(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf", weight_type="F32", extra={"llama.nextn_predict_layers": 1})
    with open_gguf(path) as file:
        assert storing_layers(file) == 1


def test_more_layers_than_there_are_cannot_keep_nothing(tmp_path: Path) -> None:
    with (
        gguf_about_attention(tmp_path, "gemma4", 30, shared_kv_layers=31) as file,
        pytest.raises(BadGGUF, match="not 31"),
    ):
        storing_layers(file)
