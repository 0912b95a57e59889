"""What layers keep where they differ, by header: as much as llama.cpp makes room for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.backends.gpu_layers import cache_by_context
from llmrun.backends.layer_heads import head_sizes, storing_layers
from llmrun.backends.llama_cpp import LlamaBackend
from llmrun.errors import BadGGUF
from llmrun.gguf.reader import GGUFFile, open_gguf
from tests.support.gguf_files import write_gguf
from tests.support.tiny_architectures import tiny_architecture


def made(tmp_path: Path, architecture: str, **attention: Any) -> GGUFFile:
    metadata = {f"{architecture}.attention.{name}": value for name, value in attention.items()}
    tensors = {"token_embd.weight": ("F32", np.zeros((1, 32), np.float32))}
    return open_gguf(write_gguf(tmp_path / "made.gguf", {"general.architecture": architecture, **metadata}, tensors))


def test_layers_with_a_window_may_have_heads_of_another_size(tmp_path: Path) -> None:
    lengths = {"key_length": 48, "value_length": 32, "key_length_swa": 16}
    with made(tmp_path, "made", **lengths) as file:
        assert head_sizes(file, [0, 8, 0], 64) == [(48, 32), (16, 32), (48, 32)]
    with made(tmp_path, "made") as file:
        assert head_sizes(file, [0, 8], 64) == [(64, 64), (64, 64)]


@pytest.mark.parametrize(
    ("architecture", "shared", "expected"),
    [("llama", {}, 30), ("gemma4", {}, 30), ("gemma4", {"shared_kv_layers": 18}, 12), ("gemma3n", {}, 20)],
)
def test_the_last_layers_may_keep_nothing(
    tmp_path: Path, architecture: str, shared: dict[str, int], expected: int
) -> None:
    with made(tmp_path, architecture, **shared) as file:
        assert storing_layers(file, 30) == expected


def test_more_layers_than_there_are_cannot_keep_nothing(tmp_path: Path) -> None:
    with made(tmp_path, "gemma4", shared_kv_layers=31) as file, pytest.raises(BadGGUF, match="31 seen"):
        storing_layers(file, 30)


@pytest.mark.parametrize("name", ["gemma4", "gemma4 E2B", "gemma4 fused"])
def test_the_cache_takes_what_was_forecast(tmp_path: Path, name: str) -> None:
    """llama.cpp says what it has taken for layers with a window and for the others, to a hundredth of a MiB."""
    with open_gguf(tiny_architecture(tmp_path, name)) as file:
        backend = LlamaBackend(file, threads=1, context_size=16384, max_sequences=1)
        backend.close()
        sizes = re.findall(r"llama_kv_cache: size = +([\d.]+) MiB", "\n".join(backend.log))
        assert len(sizes) == 2
        assert backend.info.kv_bytes == pytest.approx(sum(map(float, sizes)) * 2**20, abs=0.01 * 2**20)
        assert cache_by_context(file, max_sequences=1).of(16384) == pytest.approx(backend.info.kv_bytes, rel=0.01)
