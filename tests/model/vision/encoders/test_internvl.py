"""Tests of what only InternVL has: a class token, layer scales, and two kinds of norms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.plan.ops.activations import Activate, Activation
from llmrun.model.plan.ops.norms import LayerNorm, RmsNorm, rmsnorm_reference
from llmrun.model.vision.encoder import VisionEncoder
from llmrun.model.vision.encoders.registry import encoder_of
from llmrun.model.vision.projector import read_projector
from llmrun.model.vision.reference import encode_exactly
from tests.support.vision.projectors import TINY_PROJECTORS, tiny_projector
from tests.support.vision.prompts import picture

SIDE = 56
LARGE = TINY_PROJECTORS["internvl"].layer.replace("ln1.bias:w ", "").replace("ln2.bias:w ", "")

NORMS = " attn_q_norm:w attn_k_norm:w"


def encoder(folder: Path, **fields: Any) -> VisionEncoder:
    path = tiny_projector(folder, "internvl", image_size=SIDE, **fields)
    projector = read_projector(path)
    with open_gguf(path) as file:
        return encoder_of(file, projector)


def outputs(folder: Path, **fields: Any) -> dict[str, NDArray[np.float32]]:
    """Return the output of each stage."""
    path = tiny_projector(folder, "internvl", image_size=SIDE, **fields)
    projector, stages = read_projector(path), dict[str, NDArray[np.float32]]()
    with open_gguf(path) as file:
        encode_exactly(encoder_of(file, projector), picture(SIDE, SIDE), stages)
    return stages


def test_class_token_has_the_first_position(tmp_path: Path) -> None:
    path = tiny_projector(tmp_path, "internvl", image_size=SIDE)
    projector = read_projector(path)
    with open_gguf(path) as file:
        made = encoder_of(file, projector)
        positions, token = (
            np.frombuffer(file.read(file.tensors[name]), np.float32).reshape(-1, 64)
            for name in ("v.position_embd.weight", "v.class_embd")
        )
    geometry = made.geometry(4, 4)
    assert geometry.added is not None
    added = geometry.added(slice(None))
    assert (geometry.leading, geometry.rows) == (1, 17)
    assert np.array_equal(added[0], positions[0] + token[0])
    assert np.array_equal(added[1:], positions[1:])
    assert geometry.groups.tolist() == [[1, 2, 5, 6], [3, 4, 7, 8], [9, 10, 13, 14], [11, 12, 15, 16]]


def test_gelu_is_exact(tmp_path: Path) -> None:
    found = {op.activation for op in encoder(tmp_path).plan.ops if isinstance(op, Activate)}
    assert found == {Activation.GELU_ERF}


@pytest.mark.parametrize("name", ["ls1", "ls2"])
def test_scales_are_optional_and_used(tmp_path: Path, name: str) -> None:
    row = TINY_PROJECTORS["internvl"]
    scaled, plain = (
        outputs(tmp_path, layer=layer)["embeddings"] for layer in (row.layer, row.layer.replace(f" {name}:w", ""))
    )
    assert np.abs(scaled - plain).max() > 1e-3


def test_norms_without_biases_are_rms_norms(tmp_path: Path) -> None:
    """The encoder with 6 billion parameters has RMSNorm. The projector's norm is always a LayerNorm."""
    norms = [op for op in encoder(tmp_path, layer=LARGE).plan.ops if isinstance(op, LayerNorm | RmsNorm)]
    assert [type(op) for op in norms] == [RmsNorm] * 6 + [LayerNorm]


@pytest.mark.parametrize("width", [64, 96])
def test_queries_are_normalized_over_all_heads(tmp_path: Path, width: int) -> None:
    """With a width of 96, heads of 24 features are padded to 32."""
    path = tiny_projector(tmp_path, "internvl", image_size=SIDE, width=width, layer=LARGE + NORMS, layers=1)
    projector = read_projector(path)
    with open_gguf(path) as file:
        made = encoder_of(file, projector)
        weight = np.frombuffer(file.read(file.tensors["v.blk.0.attn_q_norm.weight"]), np.float32)
    norm = [op for op in made.plan.ops if isinstance(op, RmsNorm)][3]  # after ln1, the norm of the keys, and ln1
    assert norm.x.width == {64: 64, 96: 128}[width]
    x = np.random.default_rng(0).standard_normal((3, 4, width // 4)).astype(np.float32)
    padded = np.zeros((3, 4, norm.x.width // 4), np.float32)
    padded[..., : width // 4] = x
    found = rmsnorm_reference(padded.reshape(3, -1), norm.weight, norm.epsilon).reshape(padded.shape)
    wanted = rmsnorm_reference(x.reshape(3, -1), weight, 1e-6).reshape(x.shape)
    assert np.abs(found[..., : width // 4] - wanted).max() < 1e-6
    assert not found[..., width // 4 :].any()
