"""Tests of the memory and the time that the CPU engine predicts for images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmrun.backends.cpu.lower import kv_shapes, lower
from llmrun.backends.cpu.team import TEAM_KERNELS
from llmrun.backends.cpu.vision_costs import (
    AssumedSpeeds,
    EncoderMemory,
    EncoderTimes,
    encoder_of_header,
    kv_type_of,
)
from llmrun.backends.cpu.weights import PackedLayout, PackedMatrix, packing_kernels
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.vision.encoders.registry import ENCODERS, encoder_of
from llmrun.model.vision.projector import read_projector
from scripts.kernel_list import kernels_of, known_shapes
from tests.support.vision import projectors
from tests.support.vision.projectors import TINY_PROJECTORS, WIDTH, tiny_projector


def times(folder: Path, side: int) -> float:
    path = tiny_projector(folder, "gemma3", image_size=side)
    with open_gguf(path) as file:
        encoder = encoder_of_header(file, read_projector(path))
    return EncoderTimes(encoder, AssumedSpeeds()).image(side, side)


def test_attention_grows_with_the_square_of_patches(tmp_path: Path) -> None:
    small, medium, large = (times(tmp_path, side) for side in (448, 896, 1792))
    assert 4 < medium / small < 16
    assert medium / small < large / medium < 16


def test_images_cost_what_their_tiles_cost(tmp_path: Path) -> None:
    path = tiny_projector(tmp_path, "idefics3")
    projector = read_projector(path)
    with open_gguf(path) as file:
        found = EncoderTimes(encoder_of_header(file, projector), AssumedSpeeds())
    layout = projector.layout(1500, 1000)
    tiles = sum(len(scaled.boxes) for scaled in layout.scaled)
    assert found.layout(layout) == pytest.approx(tiles * found.image(512, 512))


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_memory_counts_keys_values_and_features(tmp_path: Path, kind: str) -> None:
    path = tiny_projector(tmp_path, "gemma3", kind)
    memory = EncoderMemory.in_header(read_projector(path), 1)
    patches, floats = 4096, np.dtype(np.float32).itemsize
    of_patch = 2 * floats * WIDTH + 2 * 3 * 14**2  # features and pixels
    of_patch += 2 * WIDTH * 2 if kind != "Q8_0" else 2 * WIDTH * 34 // 32
    assert of_patch <= memory.scratch / patches < of_patch + 2000
    assert memory.weights >= floats * patches * WIDTH  # the table of positions


def test_an_encoder_for_audio_needs_no_memory(tmp_path: Path) -> None:
    once = TINY_PROJECTORS["gemma4v"].once
    expected = EncoderMemory.in_header(read_projector(tiny_projector(tmp_path, "gemma4v")), 2)
    path = tiny_projector(tmp_path, "gemma4v", once=f"{once} a.blk.0.ffn_up:f,f mm.a.input_projection:t,f")
    with open_gguf(path) as file:
        assert "a.blk.0.ffn_up.weight" in file.tensors
    assert EncoderMemory.in_header(read_projector(path), 2) == expected


@pytest.mark.parametrize("name", TINY_PROJECTORS)
def test_the_memory_is_known_without_weights(tmp_path: Path, name: str) -> None:
    """The weights are placeholders, which are all 1."""
    projector = read_projector(tiny_projector(tmp_path, name))
    with open_gguf(projector.path) as file:
        expected = EncoderMemory.of(file, encoder_of(file, projector), 2)
    assert EncoderMemory.in_header(projector, 2) == expected


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize(("width", "heads"), [(1024, 16), (1152, 16)])
def test_wheels_contain_the_kernels_of_encoders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str, width: int, heads: int
) -> None:
    """Published encoders have heads of 64, 72 or 80 features."""
    monkeypatch.setattr(projectors, "WIDTH", width)
    monkeypatch.setattr(projectors, "HEADS", heads)
    path = tiny_projector(tmp_path, next(row for row in TINY_PROJECTORS if TINY_PROJECTORS[row].family == name), kind)
    with open_gguf(path) as file:
        encoder = encoder_of_header(file, read_projector(path))
    plan, nowhere = encoder.plan, np.empty(0, np.uint8)
    packed = {matrix.name: PackedMatrix(matrix, PackedLayout.of(matrix), nowhere) for matrix in plan.matrices}
    shapes = kv_shapes(plan, [1] * len(plan.windows), kv_type_of(encoder))
    kv = [np.zeros(shape, np.uint8) for shape in shapes]
    lowered = lower(plan, packed, kv, kv_type=kv_type_of(encoder), max_rows=16, n_threads=1)
    needed = {*lowered.kernels, *packing_kernels(plan.matrices), *TEAM_KERNELS}
    assert needed <= set(kernels_of("portable", known_shapes()))
