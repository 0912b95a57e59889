"""Tests that the comparison of encoders finds agreement, faults, and expected differences, with both engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.backends.cpu.vision import CpuVision
from llmrun.base.errors import ModelFileError
from llmrun.jobs import comparing_encoders
from llmrun.jobs.comparing_encoders import SIZE, RowsCompared, compare_encoders, sample_picture
from llmrun.model.vision.projector import read_projector
from tests.support.models.tiny_models import changed_copy
from tests.support.vision.opened import SMALL
from tests.support.vision.projectors import tiny_projector, tiny_text_model


def compared(folder: Path, name: str, weight_type: str) -> RowsCompared:
    projector = tiny_projector(folder, name, weight_type, **SMALL.get(name, {}))
    return compare_encoders(tiny_text_model(folder, name), read_projector(projector), 1)


@pytest.mark.push
@pytest.mark.parametrize(("weight_type", "least"), [("F32", 0.99999), ("F16", 0.9999), ("Q8_0", 0.99)])
def test_engines_agree(tmp_path: Path, weight_type: str, least: float) -> None:
    found = compared(tmp_path, "idefics3", weight_type)
    assert found.agrees
    assert (found.rows, found.known) == (4, "")
    assert found.tolerance == (0.99 if weight_type == "Q8_0" else 0.999)
    assert least < found.cosine <= 1
    assert 0 < found.difference < 0.1


@pytest.mark.push
@pytest.mark.parametrize("change", [lambda tile: tile[:, ::-1], lambda tile: tile[..., ::-1]])
def test_swapped_columns_and_channels_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    begin = CpuVision.begin

    def begin_otherwise(self: CpuVision, tiles: Any, layout: Any) -> Any:
        return begin(self, [np.ascontiguousarray(change(tile)) for tile in tiles], layout)

    monkeypatch.setattr(CpuVision, "begin", begin_otherwise)
    found = compared(tmp_path, "idefics3", "F16")
    assert not found.agrees
    assert found.cosine < 0.9


@pytest.mark.push
def test_rows_that_are_no_numbers_are_damage(tmp_path: Path) -> None:
    def change(_: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["mm.model.fc.weight"] = ("F32", np.full((96, 1024), np.nan, np.float32))

    path = changed_copy(tiny_projector(tmp_path, "idefics3", **SMALL["idefics3"]), tmp_path / "mmproj-nan.gguf", change)
    with pytest.raises(ModelFileError, match="the projector is damaged"):
        compare_encoders(tiny_text_model(tmp_path, "idefics3"), read_projector(path), 1)


def test_the_picture_has_no_symmetry() -> None:
    picture = sample_picture()
    assert picture.shape == (SIZE[1], SIZE[0], 3)
    for other in (picture[::-1], picture[:, ::-1], picture[::-1, ::-1], picture[..., ::-1]):
        assert (picture != other).any(-1).mean() > 0.5


def test_expected_differences_name_supported_families() -> None:
    from llmrun.model.vision.projector import FAMILIES

    assert set(comparing_encoders._KNOWN) <= set(FAMILIES)
