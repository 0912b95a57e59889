"""Tests specific to gemma3n: which layers store keys and values or are sparse, and files that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.base.errors import BadGGUF, UnsupportedModel
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.archs.parts.architecture import plan_of_header
from llmrun.model.plan.ops.attention import Attention
from llmrun.model.plan.ops.norms import CutOff
from tests.support.gguf.gguf_files import Tensor
from tests.support.models.fidelity import plan_of
from tests.support.models.tiny_architectures import tiny_architecture
from tests.support.models.tiny_models import changed_copy

REUSED = "gemma3n reused caches"


@pytest.mark.push
def test_layers_from_20_on_reuse_the_caches_of_earlier_layers(tmp_path: Path) -> None:
    """Layers 18 and 19 are the last with a cache, and layer 19 has no window."""
    plan = plan_of(tiny_architecture(tmp_path, REUSED))
    places = [(op.kv.shape.window, op.kv.layer) for op in plan.ops if isinstance(op, Attention)]
    assert places[18:] == [(24, 14), (0, 4), (24, 14), (0, 4)]
    assert [group.layers for group in plan.groups] == [15, 5]


def test_the_first_ten_layers_are_sparse(tmp_path: Path) -> None:
    plan = plan_of(tiny_architecture(tmp_path, "gemma3n"))
    sparse = [index for index, op in enumerate(plan.ops) if isinstance(op, CutOff)]
    attention = [index for index, op in enumerate(plan.ops) if isinstance(op, Attention)]
    assert [sum(index < first for index in attention) for first in sparse] == list(range(1, 11))
    assert len(attention) == 12


@pytest.mark.push
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("altup.num_inputs", 3, "a gemma3n.altup.num_inputs other than 4"),
        ("altup.active_idx", 1, "a gemma3n.altup.active_idx other than 0"),
        ("embedding_length_per_layer_input", 128, "a gemma3n.embedding_length_per_layer_input other than 256"),
        ("attention.shared_kv_layers", 3, "a gemma3n.attention.shared_kv_layers other than 2"),
        ("final_logit_softcapping", 20.0, "a gemma3n.final_logit_softcapping other than 30"),
        ("activation_sparsity_scale", np.full(22, 1.0, np.float32), "activation_sparsity_scale other than 1.64485 in"),
        ("activation_sparsity_scale", np.zeros(3, np.float32), "activation_sparsity_scale other than 1.64485 in"),
        ("attention.sliding_window_pattern", np.array([True] * 22), "not from the last layer of the same"),
        ("expert_count", 2, "expert_used_count"),
    ],
)
def test_other_models_than_the_published_ones_are_refused(tmp_path: Path, key: str, value: object, words: str) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        metadata[f"gemma3n.{key}"] = value

    path = changed_copy(tiny_architecture(tmp_path, REUSED), tmp_path / "changed.gguf", change)
    with pytest.raises((BadGGUF, UnsupportedModel), match=words), open_gguf(path) as file:
        plan_of_header(file)


@pytest.mark.push
def test_the_sparsity_may_be_rounded_differently(tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        key = "gemma3n.activation_sparsity_scale"
        metadata[key] = np.where(np.isinf(metadata[key]), metadata[key], np.nextafter(metadata[key], np.float32(2)))

    path = changed_copy(tiny_architecture(tmp_path, REUSED), tmp_path / "changed.gguf", change)
    with open_gguf(path) as file:
        assert plan_of_header(file).ops


def test_values_are_required(tmp_path: Path) -> None:
    """Gemma 4 has layers without them, Gemma 3n does not."""

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del tensors["blk.1.attn_v.weight"]

    path = changed_copy(tiny_architecture(tmp_path, "gemma3n"), tmp_path / "changed.gguf", change)
    with pytest.raises(BadGGUF, match=r"tensor missing: .*blk\.1\.attn_v\.weight"), open_gguf(path) as file:
        plan_of_header(file)
