"""Tests of encoders on the CPU engine: exact rows, and equal bits with any threads, tiles and instruction sets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.backends.cpu.vision import CpuEncoding, CpuVision
from llmrun.backends.cpu.vision_costs import kv_type_of
from llmrun.model.vision.encoder import TILE_ROWS, Geometry, RunStage, encoding
from llmrun.model.vision.layout import ImageLayout, Rows
from llmrun.model.vision.projector import read_projector
from llmrun.model.vision.reference import encode_quantizing, finished
from tests.support.kernels.runs import EXECUTABLE_LEVELS, at_level
from tests.support.vision.encoder_cases import (
    ENCODER_CASES,
    TYPES,
    difference,
    encoder_in,
    least_cosine,
)
from tests.support.vision.encoder_digests import digests_of

if TYPE_CHECKING:
    from llmrun.model.plan.builder import Stage

pytestmark = pytest.mark.push

THREADS = (1, 2, 3, 4)
TILES = (1, 5, 64, TILE_ROWS)
CASES = pytest.mark.parametrize("name", ENCODER_CASES)
WEIGHTS = pytest.mark.parametrize("weight_type", TYPES)


@contextmanager
def opened(path: Path, threads: int = 2) -> Iterator[CpuVision]:
    vision = CpuVision.loaded(read_projector(path), threads)
    try:
        yield vision
    finally:
        vision.close()


def encoded(
    vision: CpuVision, tile: NDArray[np.uint8], tile_rows: int = TILE_ROWS, replaced: RunStage | None = None
) -> NDArray[np.float32]:
    """Return the rows of a tile of an image.

    replaced  gets the output of each stage, and returns what the next stage reads
    """
    begun = begin(vision, tile)

    def run(stage: Stage, rows: NDArray[np.float32], part: slice, geometry: Geometry) -> NDArray[np.float32]:
        made = begun._run(stage, rows, part, geometry)
        return made if replaced is None else replaced(stage, made, part, geometry)

    with closing(begun):
        return finished(encoding(vision.encoder, tile, run, tile_rows))


def begin(vision: CpuVision, *tiles: NDArray[np.uint8]) -> CpuEncoding:
    """Begin to encode the tiles of an image."""
    pieces = tuple(Rows(number, 0, 0, 0) for number in range(len(tiles)))
    return vision.begin(tiles, ImageLayout(pieces, (), 0, 0))


def write(folder: Path, name: str, weight_type: str) -> tuple[Path, list[NDArray[np.uint8]]]:
    """Write the projector of a case. Returns its path, and the tiles of the case."""
    return ENCODER_CASES[name].write(folder, weight_type), ENCODER_CASES[name].pictures()


@CASES
@WEIGHTS
def test_each_stage_is_the_twin_s(tmp_path: Path, name: str, weight_type: str) -> None:
    """Each stage reads what the twin's stages have made, so that differences do not add up.

    A sum in another order rounds few activations to the next integer, which changes only few rows.
    """
    path, tiles = write(tmp_path, name, weight_type)
    expected: dict[str, NDArray[np.float32]] = {}
    with encoder_in(path) as encoder:
        encode_quantizing(encoder, tiles[0], kv_type_of(encoder), expected)
    found: dict[str, list[NDArray[np.float32]]] = {name: [] for name in expected}

    def replaced(stage: Stage, made: NDArray[np.float32], part: slice, geometry: Geometry) -> NDArray[np.float32]:
        found[stage.name].append(made.copy())  # the next stage overwrites it
        return expected[stage.name][part]

    with opened(path) as vision:
        encoded(vision, tiles[0], replaced=replaced)
        stored = {stage.name for stage in vision.encoder.plan.stages if stage.gives is None}
    for stage in expected.keys() - stored:
        differences = np.linalg.norm(np.concatenate(found[stage]) - expected[stage], axis=1)
        relative = differences / np.linalg.norm(expected[stage], axis=1)
        assert np.median(relative) <= 1e-5, stage
        assert relative.max() <= 1e-2, stage


@CASES
@WEIGHTS
def test_rows_are_the_twin_s(tmp_path: Path, name: str, weight_type: str) -> None:
    path, tiles = write(tmp_path, name, weight_type)
    with encoder_in(path) as encoder:
        expected = encode_quantizing(encoder, tiles[0], kv_type_of(encoder))
    with opened(path) as vision:
        found = encoded(vision, tiles[0])
    assert difference(found, expected) <= (2e-2 if weight_type == "Q8_0" else 1e-4)
    assert least_cosine(found, expected) > (0.999 if weight_type == "Q8_0" else 0.99999)


@CASES
@WEIGHTS
def test_threads_and_tiles_do_not_change_bits(tmp_path: Path, name: str, weight_type: str) -> None:
    path, tiles = write(tmp_path, name, weight_type)
    found = set()
    for threads in THREADS:
        with opened(path, threads) as vision:
            for tile_rows in TILES if threads == 2 else (TILE_ROWS,):
                found.add(encoded(vision, tiles[0], tile_rows).tobytes())
    assert len(found) == 1


@CASES
def test_other_tiles_do_not_change_bits(tmp_path: Path, name: str) -> None:
    path, tiles = write(tmp_path, name, "Q8_0")
    with opened(path) as vision:
        alone = [encoded(vision, tile).tobytes() for tile in tiles]
        for order in (slice(None), slice(None, None, -1)):
            rows = begin(vision, *tiles[order]).advance(60)
            assert rows is not None
            assert rows.tobytes() == b"".join(alone[order])
    assert len(set(alone)) == len(tiles)


@pytest.mark.cover(1)
@CASES
@WEIGHTS
@pytest.mark.parametrize("level", EXECUTABLE_LEVELS[1:])
def test_levels_do_not_change_bits(tmp_path: Path, level: str, name: str, weight_type: str) -> None:
    path, tiles = write(tmp_path, name, weight_type)
    with opened(path) as vision:
        expected = encoded(vision, tiles[0])
    with at_level(level), opened(path) as vision:
        assert encoded(vision, tiles[0]).tobytes() == expected.tobytes()


@pytest.mark.night
@pytest.mark.parametrize("weight_type", ["F32", "Q8_0"])
def test_numpy_s_vector_instructions_do_not_change_bits(tmp_path: Path, weight_type: str) -> None:
    """Pixels, positions and merges are computed by NumPy, which has other loops for other processors."""
    paths = {}
    for number, name in enumerate(ENCODER_CASES):
        (folder := tmp_path / str(number)).mkdir()
        paths[name] = str(ENCODER_CASES[name].write(folder, weight_type))
    features = np._core._multiarray_umath  # type: ignore[attr-defined]
    disabled = [name for name in features.__cpu_dispatch__ if features.__cpu_features__.get(name)]
    child = subprocess.run(
        [sys.executable, "-m", "tests.support.vision.encoder_digests"],
        input=json.dumps(paths),
        env=os.environ | {"NPY_DISABLE_CPU_FEATURES": " ".join(disabled)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(child.stdout) == digests_of(paths)
