"""Tests of the cache forecast from the header when layers differ in heads: it equals what llama.cpp allocates."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llmrun.backends.base import OpenOptions
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.backends.llama.placement import cache_by_context
from llmrun.backends.sizing import head_sizes
from llmrun.formats.gguf.reader import open_gguf
from tests.support.gguf.gguf_files import gguf_about_attention
from tests.support.models.tiny_architectures import tiny_architecture


def test_layers_with_a_window_may_have_heads_of_another_size(tmp_path: Path) -> None:
    lengths = {"key_length": 48, "value_length": 32, "key_length_swa": 16}
    with gguf_about_attention(tmp_path, "made", 3, **lengths) as file:
        assert head_sizes(file, [0, 8, 0], 64) == [(48, 32), (16, 32), (48, 32)]
    with gguf_about_attention(tmp_path, "made", 3) as file:
        assert head_sizes(file, [0, 8], 64) == [(64, 64), (64, 64)]


@pytest.mark.parametrize(("name", "kept"), [("deepseek2", False), ("deepseek2 V2 Lite, older", True), ("qwen3", True)])
def test_values_are_kept_unless_they_are_part_of_keys(tmp_path: Path, name: str, kept: bool) -> None:
    with open_gguf(tiny_architecture(tmp_path, name)) as file:
        [(_, value)] = head_sizes(file, [0], 64)
    assert (value > 0) == kept


@pytest.mark.push
@pytest.mark.parametrize("name", ["gemma4", "gemma4 E2B", "gemma4 fused"])
def test_the_cache_takes_what_was_forecast(tmp_path: Path, name: str) -> None:
    """llama.cpp logs what it allocated for layers with and without a window, to a hundredth of a MiB."""
    with open_gguf(tiny_architecture(tmp_path, name)) as file:
        backend = LlamaBackend(file, OpenOptions(threads=1, context_size=16384, gpu_layers=0))
        backend.close()
        sizes = re.findall(r"llama_kv_cache: size = +([\d.]+) MiB", "\n".join(backend.log))
        assert len(sizes) == 2
        assert backend.info.kv_bytes == pytest.approx(sum(map(float, sizes)) * 2**20, abs=0.01 * 2**20)
        assert cache_by_context(file, max_sequences=1).of(16384) == pytest.approx(backend.info.kv_bytes, rel=0.01)
