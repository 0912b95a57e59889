"""Tests of what only the towers of Gemma 4 have: clamps, standardization, and tables of positions by axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.base.errors import BadGGUF, UnsupportedModel
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.plan.ops.rows import Clamp
from llmrun.model.vision.encoder import VisionEncoder
from llmrun.model.vision.encoders.registry import encoder_of
from llmrun.model.vision.projector import read_projector
from llmrun.model.vision.reference import encode_exactly
from tests.support.models.tiny_models import changed_copy
from tests.support.vision.projectors import WIDTH, tiny_projector
from tests.support.vision.prompts import picture

LIMITS = ("input_max", "input_min", "output_max", "output_min")


def encoder(path: Path) -> VisionEncoder:
    projector = read_projector(path)
    with open_gguf(path) as file:
        return encoder_of(file, projector)


def rows(path: Path) -> NDArray[np.float32]:
    projector = read_projector(path)
    with open_gguf(path) as file:
        return encode_exactly(encoder_of(file, projector), picture(48, 48))


def with_limits(folder: Path, limits: dict[str, float]) -> Path:
    """Write a projector whose queries in layer 0 have these limits."""

    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name in LIMITS:
            tensors.pop(f"v.blk.0.attn_q.{name}")
        for name, limit in limits.items():
            tensors[f"v.blk.0.attn_q.{name}"] = ("F32", np.array([limit], np.float32))

    return changed_copy(tiny_projector(folder, "gemma4v"), folder / "limits.gguf", change)


def test_gelu_is_tanh_whatever_the_file_says(tmp_path: Path) -> None:
    wanted = rows(tiny_projector(tmp_path, "gemma4v"))
    assert np.array_equal(rows(tiny_projector(tmp_path, "gemma4v", gelu=False)), wanted)


@pytest.mark.push
@pytest.mark.parametrize("name", LIMITS)
def test_each_limit_clamps(tmp_path: Path, name: str) -> None:
    """A limit of 0.5 changes the rows, and one of 1000 does not."""
    sign = 1 if name.endswith("max") else -1
    free = rows(with_limits(tmp_path, {}))
    assert np.array_equal(rows(with_limits(tmp_path, {name: sign * 1000.0})), free)
    assert np.abs(rows(with_limits(tmp_path, {name: sign * 0.5})) - free).max() > 1e-3


def test_infinite_limits_add_no_ops(tmp_path: Path) -> None:
    limits = {name: np.inf if name.endswith("max") else -np.inf for name in LIMITS}
    made = encoder(with_limits(tmp_path, limits))
    assert not any(isinstance(op, Clamp) for op in made.plan.ops)


@pytest.mark.parametrize("limits", [(0.5, 1.0), (-1.0, -0.5), (1.0, -1.0), (np.nan, 1.0)])
def test_limits_without_zero_are_refused(tmp_path: Path, limits: tuple[float, float]) -> None:
    path = with_limits(tmp_path, {"output_min": limits[0], "output_max": limits[1]})
    with pytest.raises(BadGGUF, match=r"v\.blk\.0\.attn_q\.output_min.*limits must be on both sides of 0"):
        encoder(path)


@pytest.mark.push
def test_standardization_is_optional_but_complete(tmp_path: Path) -> None:
    """Files need both vectors or neither of them."""
    both = rows(tiny_projector(tmp_path, "gemma4v"))
    neither = rows(tiny_projector(tmp_path, "gemma4v", without=["v.std_bias", "v.std_scale"]))
    assert np.abs(both - neither).max() > 1e-3
    with pytest.raises(BadGGUF, match=r"tensor missing.*v\.std_scale"):
        encoder(tiny_projector(tmp_path, "gemma4v", without=["v.std_scale"]))
    with pytest.raises(UnsupportedModel, match=r"v\.std_scale"):
        encoder(tiny_projector(tmp_path, "gemma4v", without=["v.std_bias"]))


def test_heads_that_axes_cannot_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadGGUF, match="must be a multiple of 4, not 18"):
        encoder(tiny_projector(tmp_path, "gemma4v", width=72))


def test_positions_differ_by_axis(tmp_path: Path) -> None:
    """The first table is for columns, the second for rows."""
    path = tiny_projector(tmp_path, "gemma4v")
    with open_gguf(path) as file:
        tensor = file.tensors["v.position_embd.weight"]
        tables = np.frombuffer(file.read(tensor), np.float32).reshape(2, -1, WIDTH)
    added = encoder(path).geometry(6, 3).added
    assert added is not None
    assert np.array_equal(added(slice(None)).reshape(3, 6, -1)[2, 5], tables[0, 5] + tables[1, 2])
