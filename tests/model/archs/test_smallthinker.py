"""Tests specific to smallthinker: which layers have a window, and files that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.base.errors import LlmrunError
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.archs.parts.architecture import plan_of_header
from llmrun.model.plan.ops.attention import Attention
from llmrun.model.plan.ops.rope import RopeStore
from tests.support.models.fidelity import plan_of
from tests.support.models.tiny_architectures import tiny_architecture
from tests.support.models.tiny_models import changed_copy


def test_every_fourth_layer_has_neither_window_nor_rope(tmp_path: Path) -> None:
    plan = plan_of(tiny_architecture(tmp_path, "smallthinker five layers"))
    windows = [op.kv.shape.window for op in plan.ops if isinstance(op, Attention)]
    rotates = [op.query_rope is not None for op in plan.ops if isinstance(op, RopeStore)]
    assert windows == [0, 4096, 4096, 4096, 0]
    assert rotates == [False, True, True, True, False]


def test_without_a_window_all_layers_have_rope(tmp_path: Path) -> None:
    plan = plan_of(tiny_architecture(tmp_path, "smallthinker without window"))
    assert all(op.query_rope is not None for op in plan.ops if isinstance(op, RopeStore))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("attention.sliding_window", 512, "a sliding window of 512 instead of 4096 positions"),
        ("attention.sliding_window_pattern", np.array([True] * 5), "the key smallthinker.attention.sliding_window_pat"),
        ("rope.freq_base_swa", 1e4, "the key smallthinker.rope.freq_base_swa"),
        ("expert_gating_func", 0, "a smallthinker.expert_gating_func of 0"),
    ],
)
def test_files_that_would_be_computed_differently_are_refused(
    tmp_path: Path, key: str, value: object, words: str
) -> None:
    def change(metadata: dict[str, Any], tensors: object) -> None:
        metadata[f"smallthinker.{key}"] = value

    path = changed_copy(tiny_architecture(tmp_path, "smallthinker"), tmp_path / "changed.gguf", change)
    with open_gguf(path) as file, pytest.raises(LlmrunError, match=words):
        plan_of_header(file)
