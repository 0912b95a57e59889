"""Tests that a file's name, a glance at its header and the reader agree about its quantization."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.formats.gguf.glance import glance
from llmrun.formats.gguf.quantization import FILE_TYPES, quantization_in, quantization_named, quantization_of
from llmrun.formats.gguf.reader import open_gguf
from llmrun.hub.upkeep.inventory import facts_in
from llmrun.model.archs.parts.tensors import quantization
from tests.support.hub.model_stores import gguf


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
def test_the_last_quantization_in_a_file_name_counts(file: str, quantization: str) -> None:
    assert quantization_of(file) == quantization


@pytest.mark.parametrize(
    ("text", "quantization"),
    [("q4_k_m", "Q4_K_M"), ("ud-q4_k_xl", "UD-Q4_K_XL"), ("FP16", "F16"), ("4b-q4_0", ""), ("q4_0.gguf", ""), ("", "")],
)
def test_only_a_text_without_other_words_names_a_quantization(text: str, quantization: str) -> None:
    assert quantization_named(text) == quantization


@given(st.text())
def test_a_quantization_is_its_own_name(text: str) -> None:
    named = quantization_named(text)
    assert quantization_named(named) == named
    if named:
        assert quantization_of(f"model-{named}.gguf") == named


def test_file_types_are_those_of_gguf_py() -> None:
    import gguf as oracle

    known = {int(kind): kind.name for kind in oracle.LlamaFileType if kind.name != "GUESSED"}
    theirs = {number: name.removeprefix("MOSTLY_").removeprefix("ALL_") for number, name in known.items()}
    for number, name in FILE_TYPES.items():
        assert number not in theirs or theirs[number] == name
    assert len(theirs.keys() & FILE_TYPES.keys()) > 25


@pytest.mark.parametrize(
    ("file", "file_type", "wanted"),
    [
        ("m-UD-Q4_K_XL.gguf", 15, "UD-Q4_K_XL"),  # the header has no number for such mixes
        ("m-Q8_0.gguf", 15, "Q8_0"),
        ("m.gguf", 15, "Q4_K_M"),
        ("mine-q4.gguf", 15, "Q4_K_M"),  # "q4" is less than the header says
        ("mine-q4.gguf", None, "Q4"),
        ("m.gguf", 999, "F32"),
        ("m.gguf", None, "F32"),
        ("sha256-0123", 7, "Q8_0"),
    ],
)
def test_every_reader_names_the_same_quantization(
    tmp_path: Path, file: str, file_type: int | None, wanted: str
) -> None:
    path = tmp_path / file
    path.write_bytes(gguf(file_type=file_type))
    with open_gguf(path) as opened:
        assert quantization(opened) == wanted
    assert facts_in(path).quantization == wanted
    assert glance(path).quantization == quantization_in(file, file_type) == ("" if wanted == "F32" else wanted)
