"""Tests specific to hunyuan-dense: files of its relatives are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.base.errors import UnsupportedModel
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.archs.parts.architecture import plan_of_header
from tests.support.models.tiny_architectures import tiny_architecture
from tests.support.models.tiny_models import changed_copy


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"expert_count": 2, "expert_used_count": 1}, "a mixture of 2 experts"),
        ({"rope.scaling.alpha": 1000.0}, "the key hunyuan-dense.rope.scaling.alpha"),
        (
            {"rope.dimension_sections": np.array([4, 4, 4, 4], np.int32)},
            "the key hunyuan-dense.rope.dimension_sections",
        ),
    ],
)
def test_files_of_related_models_are_refused(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    def change(metadata: dict[str, Any], tensors: object) -> None:
        metadata |= {f"hunyuan-dense.{key}": value for key, value in values.items()}

    path = changed_copy(tiny_architecture(tmp_path, "hunyuan-dense"), tmp_path / "changed.gguf", change)
    with open_gguf(path) as file, pytest.raises(UnsupportedModel, match=words):
        plan_of_header(file)
