"""Tests specific to gemma4: layers that reuse earlier layers' keys and values, and files that describe them wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.base.errors import BadGGUF, UnsupportedModel
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.archs.parts.architecture import plan_of_header
from llmrun.model.plan.ops.attention import Attention
from llmrun.model.plan.ops.rope import Rotate
from tests.support.gguf.gguf_files import Tensor
from tests.support.models.fidelity import plan_of
from tests.support.models.tiny_architectures import tiny_architecture
from tests.support.models.tiny_models import changed_copy


def test_the_last_layers_look_at_the_last_of_their_kind_that_stores(tmp_path: Path) -> None:
    """Three of five layers store keys and values: two with a window, one without."""
    plan = plan_of(tiny_architecture(tmp_path, "gemma4 fused"))
    places = [(op.kv.shape.window, op.kv.layer) for op in plan.ops if isinstance(op, Attention)]
    assert places == [(16, 0), (16, 1), (0, 0), (16, 1), (0, 0)]
    assert [group.layers for group in plan.groups] == [2, 1]
    assert sum(isinstance(op, Rotate) for op in plan.ops) == 2


def test_keys_that_nobody_looks_at_are_not_loaded(tmp_path: Path) -> None:
    path = tiny_architecture(tmp_path, "gemma4 E2B")
    names = {matrix.name for matrix in plan_of(path).matrices}
    with open_gguf(path) as file:
        left = {name for name, tensor in file.tensors.items() if len(tensor.shape) > 1} - names
    assert left == {"blk.3.attn_k.weight", "blk.3.attn_v.weight"}


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("gemma4 E2B", "attention.shared_kv_layers", 1, "KV cache is not from the last layer of the same kind"),
        ("gemma4 E2B", "attention.shared_kv_layers", 4, "not 4"),
        ("gemma4 E2B", "embedding_length_per_layer_input", 24, "multiple of 16"),
        ("gemma4", "attention.sliding_window_pattern", 2, "must be an array"),
        (
            "gemma4",
            "attention.head_count_kv",
            np.array([4, 4, 3, 4], np.int32),
            "must be a divisor of 4, the number of heads, not 3",
        ),
        ("gemma4", "attention.value_length_swa", 32, "different sizes"),
        ("gemma4", "rope.dimension_count_swa", None, "exceed the head size of 16"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    tmp_path: Path, name: str, key: str, value: object, words: str
) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        if value is None:
            del metadata[f"gemma4.{key}"]
        else:
            metadata[f"gemma4.{key}"] = value

    path = changed_copy(tiny_architecture(tmp_path, name), tmp_path / "changed.gguf", change)
    with open_gguf(path) as file, pytest.raises((BadGGUF, UnsupportedModel), match=words):
        plan_of_header(file)


def test_one_layer_that_stores_is_too_few_for_others_to_look_at(tmp_path: Path) -> None:
    sizes = {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16}
    sizes |= {"attention.key_length_swa": 32, "attention.value_length_swa": 32, "attention.shared_kv_layers": 3}

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        metadata.update({f"gemma4.{key}": value for key, value in sizes.items()})
        metadata["gemma4.attention.sliding_window_pattern"] = np.array([False, True, False, True])

    path = changed_copy(tiny_architecture(tmp_path, "gemma4 E2B"), tmp_path / "changed.gguf", change)
    with (
        open_gguf(path) as file,
        pytest.raises(UnsupportedModel, match="KV cache is not from the last layer of the same kind"),
    ):
        plan_of_header(file)


def test_fused_experts_that_are_no_whole_groups_are_refused(tmp_path: Path) -> None:
    path = tiny_architecture(tmp_path, "gemma4 26B", expert_size=24)
    with (
        open_gguf(path) as file,
        pytest.raises(UnsupportedModel, match="must be a multiple of 16, not 24"),
    ):
        plan_of_header(file)
