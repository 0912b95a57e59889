"""Tests that images have the same embeddings as in the models' own code.

`scripts/transformers_rows` records the embeddings that transformers computes for a picture with tiny checkpoints. These
tests prepare the picture, and encode it with the file that llama.cpp's converter makes of the checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from llmrun.formats.gguf.reader import open_gguf
from llmrun.formats.images.resampling import tiles
from llmrun.model.vision.encoders.registry import encoder_of
from llmrun.model.vision.projector import read_projector
from llmrun.model.vision.reference import encode_exactly
from tests.support.vision.prompts import picture
from tests.support.vision.recorded_rows import recorded_projector

pytestmark = pytest.mark.push

RECORDINGS = json.loads((Path(__file__).parent / "transformers_rows.json").read_text())


@pytest.mark.parametrize("name", RECORDINGS)
def test_embeddings_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    recording = RECORDINGS[name]
    path = recorded_projector(tmp_path / "mmproj.gguf", recording)
    projector = read_projector(path, most=recording["most"])
    layout = projector.layout(*recording["size"])
    with open_gguf(path) as file:
        encoder = encoder_of(file, projector)
        rows = [encode_exactly(encoder, tile) for tile in tiles(picture(*recording["size"]), layout.scaled)]
    found, expected = np.concatenate(rows), np.array(recording["rows"])
    assert found.shape == expected.shape
    # Both compute in float32. The differences found are at most 4e-6.
    assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(expected)
