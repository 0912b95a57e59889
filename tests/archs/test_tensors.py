"""Tensors of a file, as an architecture asks for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmrun.archs.tensors import experts
from llmrun.errors import UnsupportedModel
from llmrun.gguf.reader import open_gguf
from tests.support.gguf_files import write_gguf


def written(folder: Path, outputs: int, n: int) -> Path:
    values = np.arange(n * outputs * 8, dtype=np.float32).reshape(n, outputs, 8)
    return write_gguf(folder / "experts.gguf", {"general.architecture": "llama"}, {"experts.weight": ("F32", values)})


def test_experts_are_one_matrix_after_the_other(tmp_path: Path) -> None:
    with open_gguf(written(tmp_path, 32, 3)) as file:
        matrix = experts(file, "experts.weight", 3)
        assert (matrix.rows, matrix.columns) == (96, 8)
        second = matrix.part(32, 32).read().view(np.float32)
    np.testing.assert_array_equal(second, np.arange(32 * 8, 2 * 32 * 8, dtype=np.float32).reshape(32, 8))


def test_experts_whose_outputs_are_no_whole_groups_are_refused(tmp_path: Path) -> None:
    """Their groups of 16 outputs would be of two experts."""
    with (
        open_gguf(written(tmp_path, 24, 2)) as file,
        pytest.raises(UnsupportedModel, match=r"experts\.weight: experts of 24 outputs, must be a multiple of 16"),
    ):
        experts(file, "experts.weight", 2)
