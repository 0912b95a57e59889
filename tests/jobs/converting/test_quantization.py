"""Tests that only the settings of AWQ and GPTQ that can be converted exactly are accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmrun.base.errors import ModelFileError, UnsupportedModel
from llmrun.jobs.converting.checkpoint import Checkpoint
from llmrun.jobs.converting.convert import Packing, Quantization, read_quantization
from tests.support.converting.checkpoints import tiny_checkpoint

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}


def read(folder: Path, settings: Any, **files: Any) -> Quantization | None:
    checkpoint = tiny_checkpoint(method="")
    if settings is not None:
        checkpoint.config["quantization_config"] = settings
    checkpoint.files = {f"{name}.json": json.dumps(values) for name, values in files.items()}
    with Checkpoint(checkpoint.write(folder / "model")) as opened:
        return read_quantization(opened)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (AWQ, Quantization(Packing.AWQ, 128, 0, False)),
        (AWQ | {"version": "GEMM", "group_size": -1}, Quantization(Packing.AWQ, 0, 0, False)),
        (GPTQ, Quantization(Packing.GPTQ, 128, 1, False)),
        (GPTQ | {"checkpoint_format": "gptq_v2", "group_size": 32}, Quantization(Packing.GPTQ, 32, 0, False)),
        (GPTQ | {"desc_act": True, "format": "gptq"}, Quantization(Packing.GPTQ, 128, 1, True)),
        (None, None),
    ],
)
def test_settings_are_read(settings: Any, expected: Quantization | None, tmp_path: Path) -> None:
    assert read(tmp_path, settings) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"quantize_config": {"bits": 4, "group_size": 64}}, Quantization(Packing.GPTQ, 64, 1, False)),
        (
            {"quant_config": {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}},
            Quantization(Packing.AWQ, 64, 0, False),
        ),
    ],
)
def test_older_checkpoints_have_a_file(files: Any, expected: Quantization, tmp_path: Path) -> None:
    assert read(tmp_path, None, **files) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "compressed-tensors"}, "quant_method is 'compressed-tensors', but only awq and gptq"),
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'"),
        ({"bits": 4}, "quant_method is ''"),
        (GPTQ | {"bits": 8}, "bits is 8, but only 4-bit weights"),
        (GPTQ | {"group_size": 16}, "group_size is 16, but only multiples of 32"),
        (GPTQ | {"group_size": 0}, "group_size is 0"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', but only gptq and gptq_v2"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format is true"),
        (GPTQ | {"dynamic": {"-:.*": {}}}, "dynamic has separate settings for some modules"),
        (AWQ | {"version": "gemv"}, "version is 'gemv', but only gemm"),
        (AWQ | {"checkpoint_format": "gemv_fast"}, "checkpoint_format is 'gemv_fast'"),
    ],
)
def test_other_settings_are_refused_by_name(settings: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read(tmp_path, settings)
    assert f"quantization_config.{message}" in str(caught.value).replace("config.json: ", "")


@pytest.mark.parametrize(
    "settings", ["awq", [AWQ], AWQ | {"bits": "4"}, AWQ | {"group_size": None}, GPTQ | {"group_size": -2}]
)
def test_broken_settings_are_refused(settings: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="not a valid checkpoint"):
        read(tmp_path, settings)
