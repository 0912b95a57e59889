"""Tests of what a token needs: plan and file agree, by hand and on real files, and only used experts count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.backends.fitting import ModelNeeds, needs_of_plan
from llmrun.backends.llama.placement import cache_by_context, cache_bytes
from llmrun.backends.sizing import KVBytes
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.archs import llama
from llmrun.model.plan.matrix import Matrix
from llmrun.model.plan.plan import Plan
from llmrun.model.plan.shapes import AttentionShape
from llmrun.model.plan.twin import Value
from tests.support.backends.header_needs import needs_of_file
from tests.support.backends.sliding_window import WINDOW, tiny_sliding_window
from tests.support.gguf.gguf_files import Tensor, tiny_llama, tiny_vocabulary, write_gguf
from tests.support.models.downloads import smollm2
from tests.support.models.fidelity import plan_of
from tests.support.models.tiny_architectures import TINY_ARCHITECTURES, tiny_architecture
from tests.support.models.tiny_models import TINY_MODELS, tiny_model

VOCABULARY = len(tiny_vocabulary().tokens)
LAYERS = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)  # weights in tiny_llama's matrices without its tables
KV_POSITION = 2 * 2 * 2 * 16  # numbers per position: layers, keys and values, heads, head size


def both(path: Path, **options: Any) -> tuple[ModelNeeds, ModelNeeds]:
    """Return the needs by the plan and by the file."""
    with open_gguf(path) as file:
        plan = llama.plan(file, llama.read_config(file))
        return needs_of_plan(plan, **options), needs_of_file(file, **options)


@pytest.mark.push
@pytest.mark.parametrize("name", TINY_MODELS)
def test_plan_and_file_agree_on_tiny_models(tmp_path: Path, name: str) -> None:
    """They differ only in norms, a row of the table, and padding to groups of 16 rows, which matter in tiny models."""
    planned, filed = both(tiny_model(tmp_path, name))
    assert planned.weight_bytes == pytest.approx(filed.weight_bytes, rel=0.12)
    assert planned.products == filed.products
    assert planned.kv_read == filed.kv_read


@pytest.mark.push
@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_plan_and_file_agree_on_every_architecture(tmp_path: Path, name: str) -> None:
    """Covers experts, windows and layers without keys.

    Weights may differ as for tiny models, and by vectors in the file that belong to no matrix. llama.cpp also computes
    unused keys and values where they share a matrix with the queries; our engine does not.
    """
    path = tiny_architecture(tmp_path, name)
    plan = plan_of(path)
    with open_gguf(path) as file:
        planned, filed = needs_of_plan(plan), needs_of_file(file)
    assert planned.weight_bytes == pytest.approx(filed.weight_bytes, rel=0.12)
    assert needs_of_plan(plan, packed=False).weight_bytes == pytest.approx(filed.weight_bytes, rel=0.12)
    assert planned.products == pytest.approx(filed.products, rel=0.08 if name == "gemma4 fused" else 0.02)
    if "attention.key_length_mla" not in TINY_ARCHITECTURES[name].keys:
        assert planned.kv_read == filed.kv_read


@pytest.mark.push
@pytest.mark.parametrize(
    ("kv_type", "head"),
    [("f16", 2 * 128), ("q8_0", 2 * 68), ("q4_0", 2 * 36), ("q8_0:q4_0", 68 + 36), ("q4_0:f16", 36 + 128)],
)
def test_plan_and_file_agree_on_the_real_model(kv_type: str, head: int) -> None:
    planned, filed = both(smollm2(), kv_type=kv_type)
    assert planned.weight_bytes == pytest.approx(filed.weight_bytes, rel=0.01)
    assert planned.kv_read == filed.kv_read
    assert planned.products == filed.products == 30 * (576 * (2 * 576 + 2 * 192) + 3 * 576 * 1536)
    assert filed.kv_read == KVBytes(30 * 3 * head)


def test_a_file_by_hand(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "tied.gguf", weight_type="Q4_0")
    with open_gguf(path) as file:
        weights = (LAYERS + VOCABULARY * 64) // 32 * 18
        assert needs_of_file(file) == ModelNeeds(weights, KVBytes(2 * KV_POSITION), LAYERS)
        position = KV_POSITION + KV_POSITION // 16 * 2  # heads of 16 with one scale each
        assert needs_of_file(file, kv_type="q8_0") == ModelNeeds(weights, KVBytes(position), LAYERS)


def test_values_that_are_part_of_keys_are_kept_by_our_engine_alone(tmp_path: Path) -> None:
    """A layer that predicts further tokens has no cache either, so two of three layers have one."""
    path = tiny_architecture(tmp_path, "deepseek2 GLM-4.7-Flash, fused, with a layer ahead")
    with open_gguf(path) as file:
        assert needs_of_plan(plan_of(path)).kv_read == KVBytes(2 * 2 * (64 + 32))
        assert needs_of_file(file).kv_read == cache_by_context(file) == KVBytes(2 * 2 * 64)
        assert cache_bytes(file, 256) == 256 * 2 * 2 * 64


def test_a_table_that_is_only_looked_up_is_not_read(tmp_path: Path) -> None:
    tied, untied = tmp_path / "tied.gguf", tmp_path / "untied.gguf"
    needs = [both(tiny_llama(path, weight_type="F32", tied=path is tied)) for path in (tied, untied)]
    assert needs[0] == needs[1]


def sparse_model(path: Path, **changes: Any) -> Path:
    """Write a model with layers of 8 experts and attention of different widths, which no engine runs."""
    metadata = {
        "general.architecture": "made",
        "made.block_count": 2,
        "made.embedding_length": 64,
        "made.attention.head_count": 4,
        "made.attention.head_count_kv": 2,
        "made.expert_count": 8,
        "made.expert_used_count": 2,
        **changes,
    }
    sizes = {
        "token_embd.weight": (100, 64),
        "per_layer_token_embd.weight": (100, 64),
        "position_embd.weight": (50, 64),
        "output_norm.weight": (64,),
        "output.weight": (100, 64),
        "blk.0.attn_q.weight": (64, 64),
        "blk.0.ffn_gate_exps.weight": (8, 96, 64),
        "blk.1.ffn_gate_exps.weight": (8, 96, 64),
        "blk.1.ffn_gate_shexp.weight": (96, 64),
    }
    tensors: dict[str, Tensor] = {name: ("F32", np.zeros(size, np.float32)) for name, size in sizes.items()}
    return write_gguf(path, {key: value for key, value in metadata.items() if value is not None}, tensors)


OUTPUT, QUERY, EXPERT = 100 * 64, 64 * 64, 96 * 64


@pytest.mark.parametrize(
    ("changes", "experts"),
    [
        ({}, 2 + 2),
        ({"made.expert_used_count": np.array([1, 4], np.int32)}, 1 + 4),
        ({"made.expert_used_count": 8}, 8 + 8),
        ({"made.expert_count": None, "made.expert_used_count": None}, 8 + 8),
    ],
)
def test_of_experts_those_count_that_a_token_is_sent_to(tmp_path: Path, changes: dict[str, Any], experts: int) -> None:
    with open_gguf(sparse_model(tmp_path / "sparse.gguf", **changes)) as file:
        needs = needs_of_file(file)
    inner = QUERY + (experts + 1) * EXPERT  # one expert is shared by all tokens
    assert needs.products == inner
    assert needs.weight_bytes == 4 * (OUTPUT + inner)


@pytest.mark.parametrize(
    ("changes", "position"),
    [
        ({}, 2 * 2 * 2 * 16),
        ({"made.attention.head_count_kv": None}, 2 * 4 * 2 * 16),
        ({"made.attention.head_count_kv": np.array([2, 0], np.int32)}, 2 * 2 * 16),
        ({"made.attention.head_count": np.array([4, 0], np.int32), "made.attention.head_count_kv": None}, 4 * 2 * 16),
        ({"made.attention.key_length": 48, "made.attention.value_length": 32}, 2 * 2 * (48 + 32)),
        ({"made.attention.head_count": None, "made.attention.head_count_kv": None}, 0),
    ],
)
def test_keys_and_values_of_each_layer_are_counted(tmp_path: Path, changes: dict[str, Any], position: int) -> None:
    with open_gguf(sparse_model(tmp_path / "sparse.gguf", **changes)) as file:
        assert needs_of_file(file).kv_read == KVBytes(2 * position)


def test_layers_with_a_window_read_no_more_than_that(tmp_path: Path) -> None:
    """One of four layers sees the whole context."""
    with open_gguf(tiny_sliding_window(tmp_path / "window.gguf", layers=8)) as file:
        position = 2 * 2 * 16 * 2  # heads, keys and values, head size, bytes
        assert needs_of_file(file).kv_read == KVBytes(2 * position, ((WINDOW, 6 * position),))
        assert needs_of_file(file).kv_read.of(100) == 2 * 100 * position + 6 * WINDOW * position


def test_the_plan_knows_the_windows_of_its_layers() -> None:
    plan = Plan()
    wide, narrow = Value(64), Value(32)
    for window in (0, 16, 16):
        plan.attention(wide, narrow, narrow, AttentionShape(4, 2, 16, window), None)
    plan.output(wide, Matrix.of_bytes("output", "f32", 16, 64, np.empty(0, np.uint8)))
    assert needs_of_plan(plan).kv_read == KVBytes(128, ((16, 2 * 128),))
