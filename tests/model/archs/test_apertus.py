"""Tests specific to apertus: invalid parameters of its activation are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.base.errors import BadGGUF
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.archs.parts.architecture import plan_of_header
from llmrun.model.plan.ops.activations import Xielu
from tests.support.models.fidelity import plan_of
from tests.support.models.tiny_architectures import tiny_architecture
from tests.support.models.tiny_models import changed_copy


def test_each_layer_has_its_own_curve(tmp_path: Path) -> None:
    plan = plan_of(tiny_architecture(tmp_path, "apertus"))
    first, second = (op.curve for op in plan.ops if isinstance(op, Xielu))
    assert [first.slope, second.slope] == pytest.approx([0.5, 0.3])
    assert first.positive == pytest.approx(np.log1p(np.exp(-0.4)))
    assert first.negative == pytest.approx(0.5 + np.log1p(np.exp(0.6)))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array([0.5] * 3, np.float32), "xielu.beta: must have 2 floating-point values, one for each layer"),
        (np.array([1, 2], np.int32), "xielu.beta: must have 2 floating-point values"),
        (np.array([0.5, np.nan], np.float32), r"xielu.beta: all values must be -1e\+09 to 1e\+09"),
        (np.array([0.5, 1e30], np.float32), r"xielu.beta: all values must be -1e\+09 to 1e\+09"),
        (1e10, r"xielu.beta: must be -1e\+09 to 1e\+09, not 1e\+10"),
        (None, "xielu.beta"),
    ],
)
def test_invalid_curves_are_refused(tmp_path: Path, value: object, words: str) -> None:
    def change(metadata: dict[str, Any], tensors: object) -> None:
        metadata["xielu.beta"] = value
        if value is None:
            del metadata["xielu.beta"]

    path = changed_copy(tiny_architecture(tmp_path, "apertus"), tmp_path / "changed.gguf", change)
    with open_gguf(path) as file, pytest.raises(BadGGUF, match=words):
        plan_of_header(file)
