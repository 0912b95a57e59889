"""Every architecture with quantized weights predicts what llama.cpp predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.llama_cpp_oracle import requantize
from tests.support.predictions import check_predictions
from tests.support.tiny_architecture import TinyArchitecture
from tests.support.tiny_architectures import TINY_ARCHITECTURES, tiny_architecture

# The first row of each architecture: variants differ in what no weight type changes, but for those of gemma4.
NAMES = list({row.architecture: name for name, row in reversed(TINY_ARCHITECTURES.items())}.values())
NAMES += ["gemma4 E2B", "gemma4 26B"]
# llama.cpp's GELU is a table of float16.
GELU, GELU_BOUND = ("gemma", "gemma2", "gemma3", "gemma4", "starcoder2"), 1e-6
# Wide enough for Q4_K_M, whose blocks are of 256.
WIDE: dict[str, Any] = {
    "width": 256,
    "heads": 8,
    "kv_heads": 4,
    "head_size": 32,
    "feed_forward": 256,
    "expert_size": 256,
}


@pytest.mark.parametrize("weight_type", ["Q8_0", "Q4_K_M"])
@pytest.mark.parametrize("name", NAMES)
def test_twin_and_engine_predict_what_llama_cpp_predicts(tmp_path: Path, name: str, weight_type: str) -> None:
    check_quantized(tmp_path, name, weight_type)


def test_experts_of_mxfp4_predict_what_llama_cpp_predicts(tmp_path: Path) -> None:
    """As gpt-oss is published: everything else is of Q8_0."""
    check_quantized(tmp_path, "gpt-oss", "MXFP4_MOE")


def heads_of(row: TinyArchitecture) -> dict[str, int]:
    """Those of a row whose keys and values differ are as wide as blocks are, all together."""
    if any(row.latent):
        return {name: getattr(row, name) for name in ("heads", "kv_heads", "head_size")}
    return {"kv_heads": WIDE["heads"]} if row.kv_heads == row.heads else {}


def check_quantized(tmp_path: Path, name: str, weight_type: str) -> None:
    row = TINY_ARCHITECTURES[name]
    plain = tiny_architecture(tmp_path, name, **WIDE | heads_of(row))
    path = requantize(plain, tmp_path / "quantized.gguf", weight_type)
    bound = {"twin_bound": GELU_BOUND} if row.architecture in GELU else {}
    check_predictions(path, tmp_path, of_experts=row.experts > 0, **bound)
