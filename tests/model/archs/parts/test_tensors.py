"""Tests of how an architecture requests a file's tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmrun.base.errors import UnsupportedModel
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.archs.parts.tensors import Tensors, experts, matrix
from tests.support.gguf.gguf_files import write_gguf


def written(folder: Path, outputs: int, n: int) -> Path:
    values = np.arange(n * outputs * 8, dtype=np.float32).reshape(n, outputs, 8)
    return write_gguf(folder / "experts.gguf", {"general.architecture": "llama"}, {"experts.weight": ("F32", values)})


def test_experts_are_one_matrix_after_the_other(tmp_path: Path) -> None:
    with open_gguf(written(tmp_path, 32, 3)) as file:
        whole = experts(file, "experts.weight", 3)
        assert (whole.rows, whole.columns) == (96, 8)
        second = whole.part(32, 32).read().view(np.float32)
    np.testing.assert_array_equal(second, np.arange(32 * 8, 2 * 32 * 8, dtype=np.float32).reshape(32, 8))


def test_experts_whose_outputs_are_no_whole_groups_are_refused(tmp_path: Path) -> None:
    """A group of 16 outputs would belong to two experts."""
    with (
        open_gguf(written(tmp_path, 24, 2)) as file,
        pytest.raises(
            UnsupportedModel, match=r"experts\.weight: the outputs of an expert must be a multiple of 16, not 24"
        ),
    ):
        experts(file, "experts.weight", 2)


def test_both_matrices_of_each_expert_in_one_tensor_are_two(tmp_path: Path) -> None:
    values = np.arange(2 * 32 * 8, dtype=np.float32).reshape(2, 2, 16, 8)
    with open_gguf(written(tmp_path, 32, 2)) as file:
        gate, up = Tensors(file).halves_of_experts("experts.weight", 8, 16, 2)
        np.testing.assert_array_equal(gate.read().view(np.float32), values[:, 0].reshape(32, 8))
        np.testing.assert_array_equal(up.read().view(np.float32), values[:, 1].reshape(32, 8))


def test_a_part_of_each_expert_is_read_from_anywhere(tmp_path: Path) -> None:
    """Packing reads this way: from several threads, in pieces of whole rows that may span two experts."""
    with open_gguf(written(tmp_path, 32, 3)) as file:
        up = experts(file, "experts.weight", 3).part_of_each(3, 16, 16)
        whole = up.read().reshape(-1)
        for start, size in ((0, 32), (480, 64), (100, 1200), (1500, 36), (1535, 1)):
            piece = np.empty(size, np.uint8)
            up.read_into(start, piece)
            np.testing.assert_array_equal(piece, whole[start : start + size])


def test_gathered_rows_are_read_from_anywhere(tmp_path: Path) -> None:
    """Packing reads this way, see above. The row -1 is a row of zeros."""
    with open_gguf(written(tmp_path, 32, 3)) as file:
        found = matrix(file, "experts.weight")
        rows = np.array([5, -1, 0, 7, 7, -1])
        gathered = found.gathered("some", rows)
        whole = np.where(rows[:, None] < 0, np.uint8(0), found.read()[rows])
        np.testing.assert_array_equal(gathered.read(), whole)
        for start, size in ((0, 32), (40, 64), (gathered.n_bytes - 1, 1)):
            piece = np.empty(size, np.uint8)
            gathered.read_into(start, piece)
            np.testing.assert_array_equal(piece, whole.reshape(-1)[start : start + size])


def test_what_is_left_out_is_not_missed_and_all_else_is(tmp_path: Path) -> None:
    with open_gguf(written(tmp_path, 32, 2)) as file:
        tensors = Tensors(file)
        tensors.leave_out("other")
        with pytest.raises(UnsupportedModel, match=r"experts\.weight: not part of this architecture"):
            tensors.finish()
        tensors.leave_out("experts.")
        tensors.finish()
