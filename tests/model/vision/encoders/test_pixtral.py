"""Tests of what only Pixtral has: the embedding of [IMG_BREAK], and a projector with or without a patch merger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.base.errors import BadGGUF
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.plan.ops.activations import Activate, Activation, Gated
from llmrun.model.vision.encoder import VisionEncoder
from llmrun.model.vision.encoders.registry import encoder_of
from llmrun.model.vision.projector import read_projector
from llmrun.model.vision.reference import encode_exactly
from tests.support.vision.projectors import tiny_projector
from tests.support.vision.prompts import picture


def encoder(folder: Path, **fields: Any) -> VisionEncoder:
    path = tiny_projector(folder, "pixtral", **fields)
    projector = read_projector(path)
    with open_gguf(path) as file:
        return encoder_of(file, projector)


def test_rows_end_with_a_break_except_the_last(tmp_path: Path) -> None:
    path = tiny_projector(tmp_path, "pixtral")
    projector = read_projector(path)
    with open_gguf(path) as file:
        rows = encode_exactly(encoder_of(file, projector), picture(84, 140))
        line_break = np.frombuffer(file.read(file.tensors["v.token_embd.img_break"]), np.float32)
    assert len(rows) == projector.layout(84, 140).rows == 3 * 5 + 4
    assert np.flatnonzero((rows == line_break).all(1)).tolist() == [3, 7, 11, 15]


def test_features_of_a_square_are_interleaved(tmp_path: Path) -> None:
    x = np.arange(16 * 64, dtype=np.float32).reshape(16, 64)
    made = encoder(tmp_path)
    merged = made.merged(x, made.geometry(4, 4).groups)
    wanted: NDArray[np.float32] = np.stack([x[2], x[3], x[6], x[7]], axis=1)
    assert np.array_equal(merged[1], wanted.reshape(-1))


@pytest.mark.parametrize(
    ("keys", "activation"), [({"silu": True}, Activation.SILU), ({"silu": False, "gelu": True}, Activation.GELU_ERF)]
)
def test_gelu_is_exact(tmp_path: Path, keys: dict[str, bool], activation: Activation) -> None:
    made = encoder(tmp_path, **keys)
    assert {op.activation for op in made.plan.ops if isinstance(op, Gated)} == {activation}
    assert {op.activation for op in made.plan.ops if isinstance(op, Activate)} == {Activation.GELU_ERF}


def test_heads_that_axes_cannot_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadGGUF, match="must be a multiple of 4, not 18"):
        encoder(tmp_path, width=72)
