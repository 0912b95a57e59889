"""Tests that the plans of encoders compute what libmtmd computes, stage by stage."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmrun.base.errors import BadGGUF
from llmrun.model.vision.reference import encode_exactly
from tests.support.vision.encoder_cases import ENCODER_CASES, compared, difference, encoder_in, least_cosine
from tests.support.vision.projectors import tiny_projector

pytestmark = pytest.mark.push

CASES = pytest.mark.parametrize("name", ENCODER_CASES)


@CASES
def test_every_stage_is_libmtmd_s(tmp_path: Path, name: str) -> None:
    """If libmtmd looks up the last GELU in a table of float16, neighbouring entries may be found."""
    case = ENCODER_CASES[name]
    differences = {stage: difference(*values) for stage, values in compared(case, tmp_path, "F32").items()}
    assert differences.pop("rows") <= (2e-4 if case.tanh else 1e-4)
    assert max(differences.values(), default=0) <= 1e-4, differences


@CASES
@pytest.mark.parametrize(("weight_type", "limit"), [("F16", 2e-3), ("Q8_0", 2e-2)])
def test_rows_of_quantized_files_are_libmtmd_s(tmp_path: Path, name: str, weight_type: str, limit: float) -> None:
    """Libmtmd rounds the inputs of products to float16 or to 8 bits."""
    found, expected = compared(ENCODER_CASES[name], tmp_path, weight_type)["rows"]
    assert difference(found, expected) <= limit
    assert least_cosine(found, expected) > 0.999


@pytest.mark.parametrize("position", [np.nan, np.inf, 1e31])
def test_positions_that_would_overflow_are_refused(tmp_path: Path, position: float) -> None:
    values = np.full((64, 64), position, np.float32)
    path = tiny_projector(tmp_path, "gemma3", image_size=112, replaced={"v.position_embd.weight": ("F32", values)})
    with pytest.raises(BadGGUF, match="must be numbers of at most 1e\\+30"), encoder_in(path):
        pass


def test_smolvlm_s_epsilon_is_the_model_s(tmp_path: Path) -> None:
    """The model's code has 1e-6 where the converter writes 1e-5."""
    case = ENCODER_CASES["idefics3"]
    rows = {}
    for epsilon in (1e-6, 1e-5, 1e-4):
        with encoder_in(replace(case, fields={**case.fields, "epsilon": epsilon}).write(tmp_path, "F32")) as encoder:
            rows[epsilon] = encode_exactly(encoder, case.pictures()[0])
    assert np.array_equal(rows[1e-5], rows[1e-6])
    assert not np.array_equal(rows[1e-4], rows[1e-6])


def test_wide_images_need_no_memory_for_positions(tmp_path: Path) -> None:
    """Positions interpolated for all columns of the table would need more memory than the features."""
    with encoder_in(ENCODER_CASES["qwen3vl"].write(tmp_path, "F32")) as encoder:
        tracemalloc.start()
        geometry = encoder.geometry(2000, 8)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < geometry.rows * encoder.x.width
