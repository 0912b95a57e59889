"""Tests that libmtmd counts the rows of our tiles as we do, and does not scale them again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from llmrun.base.errors import UsageError
from llmrun.model.vision.projector import FAMILY_NAMES, read_projector
from tests.support.vision.layouts import image_sizes, tile_sizes
from tests.support.vision.libmtmd import libmtmd_chunks
from tests.support.vision.projectors import tiny_projector, tiny_text_model

pytestmark = pytest.mark.push

SIZES = 60  # scripts/compare_images runs any number


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_libmtmd_keeps_our_tiles(tmp_path: Path, name: str) -> None:
    path, model = tiny_projector(tmp_path, name), tiny_text_model(tmp_path, name)
    projector = read_projector(path)
    tiles: dict[tuple[int, int], int] = {}
    for size in image_sizes(random.Random(name), SIZES):
        for detail in ("low", "auto", "high"):
            try:
                tiles |= tile_sizes(projector.layout(*size, detail))
            except UsageError:
                assert name.startswith("qwen")
    # With a limit of one tile, Idefics3 makes one tile and an overview of the same size.
    answers = libmtmd_chunks(path, model, list(tiles), least=1, most=projector.most_rows)
    expected = {size: [count] * (2 if name == "idefics3" else 1) for size, count in tiles.items()}
    found = {
        size: [chunk for chunk in chunks or () if isinstance(chunk, int)]
        for size, chunks in zip(tiles, answers, strict=True)
    }
    assert found == expected
