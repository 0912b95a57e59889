"""Tests that the tiny models are real models: ours opens them and llama.cpp runs them, including the vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from llmrun.formats.gguf.reader import open_gguf
from tests.support.gguf.gguf_files import llama3_rope_factors, tiny_llama, tiny_spm_vocabulary


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"weight_type": "F32", "tied": False},
        {"weight_type": "F16", "rope_scaling": "linear"},
        {"weight_type": "BF16", "head_size": 32},
        {"weight_type": "Q4_0", "rope_scaling": "llama3"},
        {"weight_type": "Q4_1", "heads": 2, "kv_heads": 1, "layers": 1},
        {"vocabulary": tiny_spm_vocabulary()},
    ],
    ids=["plain", "untied", "linear", "head-size", "llama3", "shape", "spm"],
)
def test_llama_cpp_runs_a_tiny_model(tmp_path: Path, shape: dict[str, Any]) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf", **shape)
    with open_gguf(path) as file:
        count = len(file.strings("tokenizer.ggml.tokens"))
        assert file.tensors["token_embd.weight"].type.name == shape.get("weight_type", "Q8_0")
    model = llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, logits_all=True, verbose=False)
    try:
        ids = model.tokenize(b"Hello world", add_bos=False)
        assert model.detokenize(ids).strip() == b"Hello world"
        model.eval(ids)
        logits = model.scores[: len(ids)]
        assert logits.shape == (len(ids), count)
        assert np.isfinite(logits).all()
        assert logits.std() > 0.1
    finally:
        model.close()


def test_the_same_seed_makes_the_same_file(tmp_path: Path) -> None:
    first, second, other = (tiny_llama(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()


def test_llama3_rope_factors_keep_short_waves_and_stretch_long_ones() -> None:
    factors = llama3_rope_factors(128, 500_000.0)
    wavelength = 2 * np.pi * 500_000.0 ** (np.arange(0, 128, 2) / 128)
    assert factors.shape == (64,)
    assert (factors[wavelength < 8192 / 4] == 1).all()
    assert (factors[wavelength > 8192] == 8).all()
    assert (np.diff(factors) >= 0).all()
