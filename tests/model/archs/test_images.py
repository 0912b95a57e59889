"""Tests of the sections of M-RoPE, and of files that use the rows of images in other ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.base.errors import BadGGUF, UnsupportedModel
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.archs.parts.rope_settings import RopeSettings
from tests.support.gguf.gguf_files import Tensor, write_gguf
from tests.support.models.fidelity import plan_of
from tests.support.models.tiny_architectures import tiny_architecture
from tests.support.models.tiny_models import changed_copy


def interleaved(height: int, width: int, pairs: int) -> list[int]:
    """Qwen3-VL replaces every third pair of time, from the second on, by height, and from the third on by width."""
    axes = np.zeros(pairs, int)
    axes[1 : 3 * height : 3] = 1
    axes[2 : 3 * width : 3] = 2
    found: list[int] = axes.tolist()
    return found


@pytest.mark.parametrize(
    ("sections", "is_interleaved", "expected"),
    [
        ((24, 20, 20, 0), True, interleaved(20, 20, 64)),  # Qwen3-VL
        ((11, 11, 10, 0), True, interleaved(11, 10, 32)),  # Qwen3.5
        ((16, 24, 24, 0), False, [0] * 16 + [1] * 24 + [2] * 24),  # Qwen2-VL
        ((8, 12, 12, 0), False, [0] * 8 + [1] * 12 + [2] * 12),  # GLM-4.1V
        ((1, 2, 1, 0), False, [0, 1, 1, 2] * 3),
        ((2, 1, 1, 0), True, [0, 1, 2, 0] * 3),
    ],
)
def test_sections_choose_the_position_of_each_pair(
    tmp_path: Path, sections: tuple[int, ...], is_interleaved: bool, expected: list[int]
) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "a", "a.rope.dimension_sections": [*sections]}, {})
    settings = RopeSettings(2 * len(expected), 5e6, 1.0, None, 4096, 1.0)
    with open_gguf(path) as file:
        found = settings.with_sections_of(Keys(file), 2 * len(expected), interleaved=is_interleaved)
    assert list(found.axes) == expected


@pytest.mark.parametrize(
    ("name", "key", "value", "error", "words"),
    [
        ("qwen3vlmoe", "n_deepstack_layers", 3, BadGGUF, "n_deepstack_layers: must be at most 2, not 3"),
        ("granite", "deepstack_mapping", [0, -1], UnsupportedModel, r"chosen layers \(granite.deepstack_mapping\)"),
    ],
)
def test_other_uses_of_rows_are_refused(
    tmp_path: Path, name: str, key: str, value: object, error: type[Exception], words: str
) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        metadata[f"{name}.{key}"] = value

    path = changed_copy(tiny_architecture(tmp_path, name), tmp_path / "changed.gguf", change)
    with pytest.raises(error, match=words):
        plan_of(path)
