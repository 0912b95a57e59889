"""Tests of encoders on the CPU engine: exact rows, and equal bits with any threads, tiles and instruction sets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.backends.cpu.vision import CpuVision, kv_type_of
from llmrun.model.vision.encoder import TILE_ROWS, encoding
from llmrun.model.vision.projector import read_projector
from llmrun.model.vision.reference import encode_quantizing
from tests.support.kernels.runs import EXECUTABLE_LEVELS, at_level
from tests.support.vision.encoder_cases import (
    ENCODER_CASES,
    TYPES,
    difference,
    encoder_in,
    least_cosine,
)

pytestmark = pytest.mark.push

THREADS = (1, 2, 3, 4)
TILES = (1, 5, 64, TILE_ROWS)
CASES = pytest.mark.parametrize("name", ENCODER_CASES)
WEIGHTS = pytest.mark.parametrize("weight_type", TYPES)


@contextmanager
def opened(path: Path, threads: int = 2) -> Iterator[CpuVision]:
    vision = CpuVision(read_projector(path), threads)
    try:
        yield vision
    finally:
        vision.close()


def encoded(vision: CpuVision, *tiles: NDArray[np.uint8], tile_rows: int = TILE_ROWS) -> NDArray[np.float32]:
    """Return the rows of all tiles."""
    rows = []
    for tile in tiles:
        steps = encoding(vision.encoder, tile, vision._run, tile_rows)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                rows.append(end.value)
                break
    return np.concatenate(rows)


def pictures(name: str) -> Sequence[NDArray[np.uint8]]:
    return ENCODER_CASES[name].pictures()


@CASES
@WEIGHTS
def test_rows_are_the_twin_s(tmp_path: Path, name: str, weight_type: str) -> None:
    path, tile = ENCODER_CASES[name].write(tmp_path, weight_type), pictures(name)[0]
    with encoder_in(path) as encoder:
        expected = encode_quantizing(encoder, tile, kv_type_of(encoder))
    with opened(path) as vision:
        found = encoded(vision, tile)
    # Sums in another order can round an activation to the next integer, which the following layers multiply.
    assert difference(found, expected) <= (5e-3 if weight_type == "Q8_0" else 1e-4)
    assert least_cosine(found, expected) > 0.9999


@CASES
@WEIGHTS
def test_threads_and_tiles_do_not_change_bits(tmp_path: Path, name: str, weight_type: str) -> None:
    path, tile = ENCODER_CASES[name].write(tmp_path, weight_type), pictures(name)[0]
    found = set()
    for threads in THREADS:
        with opened(path, threads) as vision:
            for tile_rows in TILES if threads == 2 else (TILE_ROWS,):
                found.add(encoded(vision, tile, tile_rows=tile_rows).tobytes())
    assert len(found) == 1


@CASES
def test_other_tiles_do_not_change_bits(tmp_path: Path, name: str) -> None:
    path, tiles = ENCODER_CASES[name].write(tmp_path, "Q8_0"), pictures(name)
    with opened(path) as vision:
        alone = [encoded(vision, tile).tobytes() for tile in tiles]
        assert encoded(vision, *tiles).tobytes() == b"".join(alone)
        assert encoded(vision, *tiles[::-1]).tobytes() == b"".join(alone[::-1])
    assert len(set(alone)) == len(tiles)


@pytest.mark.cover(1)
@CASES
@WEIGHTS
@pytest.mark.parametrize("level", EXECUTABLE_LEVELS[1:])
def test_levels_do_not_change_bits(tmp_path: Path, level: str, name: str, weight_type: str) -> None:
    path, tile = ENCODER_CASES[name].write(tmp_path, weight_type), pictures(name)[0]
    with opened(path) as vision:
        expected = encoded(vision, tile)
    with at_level(level), opened(path) as vision:
        assert encoded(vision, tile).tobytes() == expected.tobytes()
