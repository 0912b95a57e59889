"""Compare the predictions of every architecture with llama.cpp's, on quantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.formats.gguf.reader import open_gguf
from tests.support.models.llama_cpp_oracle import requantize
from tests.support.models.predictions import check_predictions
from tests.support.models.tiny_architecture import TinyArchitecture
from tests.support.models.tiny_architectures import TINY_ARCHITECTURES, tiny_architecture

pytestmark = pytest.mark.push

# The first row of each architecture, and variants with matrices that no first row has.
NAMES = list({row.architecture: name for name, row in reversed(TINY_ARCHITECTURES.items())}.values())
NAMES += ["gemma4 E2B", "gemma4 26B", "deepseek2 V2 Lite, older", "qwen3next older"]
NAMES += ["nemotron_h_moe Super, with a layer ahead"]
# llama.cpp computes GELU with a float16 table, so the bound is larger.
GELU, GELU_BOUND = ("gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "starcoder2"), 1e-6
# Wide enough for Q4_K_M, which has blocks of 256.
WIDE: dict[str, Any] = {
    "width": 256,
    "heads": 8,
    "kv_heads": 4,
    "head_size": 32,
    "feed_forward": 256,
    "expert_size": 256,
}


@pytest.mark.night
@pytest.mark.parametrize("weight_type", [pytest.param("Q8_0", marks=pytest.mark.night), "Q4_K_M"])
@pytest.mark.parametrize("name", NAMES)
def test_twin_and_engine_predict_what_llama_cpp_predicts(tmp_path: Path, name: str, weight_type: str) -> None:
    check_quantized(tmp_path, name, weight_type)


def test_experts_of_mxfp4_predict_what_llama_cpp_predicts(tmp_path: Path) -> None:
    """The published gpt-oss files keep everything except the experts in Q8_0."""
    check_quantized(tmp_path, "gpt-oss", "MXFP4_MOE")


# Keys whose value is a width, if a row has them at all.
WIDTHS = (
    "attention.q_lora_rank",
    "embedding_length_per_layer_input",
    "expert_shared_feed_forward_length",
    "moe_latent_size",
)
# The sizes of gated delta nets and of Mamba-2 layers, whose inner size must be twice the width in granitehybrid.
OF_DELTA_NETS = {"ssm.state_size": 64, "ssm.inner_size": 256}
OF_MAMBA = {"ssm.state_size": 64, "ssm.inner_size": 512}
# Narrower than a block, as in published models: a head has 128 or 192 features that are not rotated.
NARROW = {"attn_k_b"}


def sizes_of(row: TinyArchitecture) -> dict[str, Any]:
    """Return sizes with which the row's own widths are also multiples of a block."""
    sizes: dict[str, Any] = {"keys": {**row.keys, **{key: 256 for key in WIDTHS if row.keys.get(key)}}}
    if "feed_forward_length" in row.keys:  # one for each layer
        sizes["keys"]["feed_forward_length"] = np.full(row.layers, WIDE["feed_forward"], np.int32)
    if "ssm.inner_size" in row.keys:
        sizes["keys"] |= OF_DELTA_NETS if row.architecture.startswith("qwen") else OF_MAMBA
    if row.architecture == "jamba":
        sizes["keys"]["ssm.time_step_rank"] = WIDE["width"]  # a width, not a number of heads
    if row.kv_heads == row.heads:
        sizes["kv_heads"] = WIDE["heads"]
    if any(row.latent):
        sizes |= {"latent": (256, 32), "head_size": row.head_size}
        sizes.setdefault("kv_heads", row.kv_heads)
    if row.window_head_size:
        sizes["window_head_size"] = WIDE["head_size"]
    return WIDE | sizes


def check_quantized(tmp_path: Path, name: str, weight_type: str) -> None:
    row = TINY_ARCHITECTURES[name]
    plain = tiny_architecture(tmp_path, name, **sizes_of(row))
    path = requantize(plain, tmp_path / "quantized.gguf", weight_type)
    assert made_for_want_of_width(path) <= NARROW
    bound = {"twin_bound": GELU_BOUND} if row.architecture in GELU else {}
    check_predictions(path, tmp_path, of_experts=row.experts > 0, **bound)


def made_for_want_of_width(path: Path) -> set[str]:
    """Return the matrices of types that llama.cpp uses only if rows are not multiples of 256, without their layer
    numbers."""
    with open_gguf(path) as file:
        narrow = [name for name, tensor in file.tensors.items() if tensor.type.name in ("Q5_0", "Q5_1")]
    return {name.removesuffix(".weight").rpartition(".")[2] for name in narrow}
