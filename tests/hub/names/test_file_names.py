"""Tests of what the names of model files reveal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.hub.names import quantization_named, quantization_of, shards_of, without_shard


@pytest.mark.parametrize(
    ("file", "quantization"),
    [
        ("Qwen3-4B-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-3b-instruct-q5_k_m.gguf", "Q5_K_M"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("gemma-4-E2B_q4_0-it.gguf", "Q4_0"),
        ("Qwen3.6-35B-A3B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("model-IQ4_XS.gguf", "IQ4_XS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("phi-4-bf16.gguf", "BF16"),
        ("model-fp16.gguf", "F16"),
        ("model-F32.gguf", "F32"),
        ("gemma-3-4b-it-qat-q4_0-Q8_0.gguf", "Q8_0"),
        ("Q8_0/model.gguf", ""),
        ("model.gguf", ""),
        ("Q4_K_M.txt.gguf", "Q4_K_M"),
        ("unq4_0.gguf", ""),
    ],
)
def test_a_files_quantization_is_the_last_that_its_name_says(file: str, quantization: str) -> None:
    assert quantization_of(file) == quantization


@pytest.mark.parametrize(
    ("text", "quantization"),
    [("q4_k_m", "Q4_K_M"), ("ud-q4_k_xl", "UD-Q4_K_XL"), ("FP16", "F16"), ("4b-q4_0", ""), ("q4_0.gguf", ""), ("", "")],
)
def test_a_quantization_by_itself_is_nothing_else(text: str, quantization: str) -> None:
    assert quantization_named(text) == quantization


@given(st.text())
def test_a_quantization_is_its_own_name(text: str) -> None:
    named = quantization_named(text)
    assert quantization_named(named) == named
    if named:
        assert quantization_of(f"model-{named}.gguf") == named


def test_shards_are_counted_from_the_first() -> None:
    assert shards_of("a/b-00001-of-00003.gguf") == tuple(f"a/b-0000{n}-of-00003.gguf" for n in (1, 2, 3))
    assert shards_of("model.gguf") == ("model.gguf",)
    assert shards_of("b-00001-of-00001.GGUF") == ("b-00001-of-00001.GGUF",)
    assert without_shard("a/b-00002-of-00003.gguf") == "a/b.gguf"
    assert without_shard("b.gguf") == "b.gguf"


@pytest.mark.parametrize(
    "file", ["b-00002-of-00003.gguf", "b-00000-of-00003.gguf", "b-00001-of-00000.gguf", "b-00001-of-99999.gguf"]
)
def test_a_model_is_not_named_by_another_shard_or_by_numbers_that_cannot_be(file: str) -> None:
    with pytest.raises(ValueError, match="first shard"):
        shards_of(file)
