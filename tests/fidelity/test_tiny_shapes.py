"""Test shapes, ropes, vocabularies and weight types that SmolLM2 does not have, with random weights.

In all of these, the twin's divergence is 2e-13 to 6e-13 nats.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.gguf.gguf_files import tiny_llama, tiny_spm_vocabulary
from tests.support.models.llama_cpp_oracle import requantize
from tests.support.models.predictions import check_predictions

pytestmark = pytest.mark.push

SHAPES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tied": False},
    "linear rope": {"rope_scaling": "linear"},
    "llama 3.1 rope": {"rope_scaling": "llama3", "rope_base": 500_000.0, "width": 128, "heads": 2, "kv_heads": 1},
    "wide heads": {"head_size": 32},
    "one kv head": {"kv_heads": 1},
    "a kv head each": {"kv_heads": 4},
    "three layers": {"layers": 3, "feed_forward": 160},
    "sentencepiece": {"vocabulary": tiny_spm_vocabulary()},
}
FLOAT_SHAPES: dict[str, dict[str, Any]] = {
    "no width a multiple of 32": {"width": 80, "heads": 5, "kv_heads": 5, "feed_forward": 100},
}
FLOAT_TYPES = ("F32", "F16", "BF16")
TYPES = (*FLOAT_TYPES, "Q8_0", "Q4_0", "Q4_1")

CASES = [("tied", weight_type) for weight_type in TYPES]
CASES += [(shape, weight_type) for shape in SHAPES if shape != "tied" for weight_type in ("F32", "Q4_1")]
CASES += [(shape, weight_type) for shape in FLOAT_SHAPES for weight_type in FLOAT_TYPES]


# Files as written by llama.cpp, with mixed types. Those that need an importance matrix are missing.
K_QUANTS = ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K")
QUANTIZED = ("Q5_0", "Q5_1", *K_QUANTS, "IQ4_NL", "IQ4_XS", "IQ3_S", "TQ1_0", "TQ2_0")
QUANTIZED_SHAPE: dict[str, Any] = {"width": 256, "heads": 4, "kv_heads": 2, "feed_forward": 512}


@pytest.mark.cover(1)
@pytest.mark.parametrize(("shape", "weight_type"), CASES)
def test_twin_and_engine_predict_what_llama_cpp_predicts(tmp_path: Path, shape: str, weight_type: str) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf", weight_type=weight_type, **(SHAPES | FLOAT_SHAPES)[shape])
    check_predictions(path, tmp_path)


@pytest.mark.parametrize("weight_type", QUANTIZED)
def test_files_that_llama_cpp_quantized_are_predicted_as_it_does(tmp_path: Path, weight_type: str) -> None:
    plain = tiny_llama(tmp_path / "plain.gguf", weight_type="F32", **QUANTIZED_SHAPE)
    check_predictions(requantize(plain, tmp_path / "quantized.gguf", weight_type), tmp_path)
