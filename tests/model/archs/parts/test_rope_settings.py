"""Tests of the sections of M-RoPE, against the definitions of the published models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.archs.parts.rope_settings import RopeSettings
from tests.support.gguf.gguf_files import write_gguf


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
