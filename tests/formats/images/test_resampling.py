"""Tests of resizing: the bytes are those of Pillow."""

from __future__ import annotations

import hashlib
from itertools import product
from math import pi, sin
from random import Random

import numpy as np
import PIL
import pytest
from PIL import Image

from llmrun.formats.images import resampling
from llmrun.formats.images.resampling import resized, tiles
from llmrun.formats.images.scaling import Box, Filter, Scaled
from tests.support.images.files import Picture, picture

FILTERS = {
    Filter.BILINEAR: Image.Resampling.BILINEAR,
    Filter.BICUBIC: Image.Resampling.BICUBIC,
    Filter.LANCZOS: Image.Resampling.LANCZOS,
}
SIZES = [  # from, to
    ((1, 1), (1, 1)),
    ((1, 1), (896, 896)),
    ((1, 10_000), (1, 10_000)),
    ((1, 10_000), (896, 896)),
    ((1, 10_000), (1, 1)),
    ((10_000, 1), (3, 7)),
    ((10_000, 3), (10_000, 9)),
    ((16_384, 2), (31, 2)),
    ((448, 448), (448, 448)),
    ((448, 448), (448, 224)),  # exact multiples
    ((224, 448), (448, 448)),
    ((896, 672), (224, 224)),
    ((300, 300), (100, 100)),
    ((2, 2), (1, 1)),  # means, half of which are ties
    ((64, 2), (32, 1)),
    ((640, 480), (639, 481)),
    ((300, 700), (290, 300)),  # Pillow 13 begins with the rows
    ((300, 700), (100, 300)),  # the rows shrink by exactly twice as much as the columns
    ((300, 700), (200, 450)),  # by more than twice as much
    ((300, 300), (301, 299)),
]


def random_picture(width: int, height: int, seed: int) -> Picture:
    """Return noise, which may have two values only, so that many means are ties or exceed the range of a byte."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    low, high = ((0, 0), (0, 255), (0, 1), (254, 255))[seed % 4]
    return noise if high == 0 else np.where(noise > 127, np.uint8(high), np.uint8(low))


def expected(pixels: Picture, width: int, height: int, name: Filter) -> Picture:
    """Resize with Pillow. Before version 13, Pillow always began with the columns."""
    image, method = Image.fromarray(pixels), FILTERS[name]
    rows, columns = image.height - height, image.width - width
    if int(PIL.__version__.split(".")[0]) < 13 and rows > max(0, 2 * columns):
        image = image.resize((image.width, height), method)
    return np.asarray(image.resize((width, height), method))


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize(("old", "new"), SIZES)
def test_resized_bytes_are_those_of_pillow(old: tuple[int, int], new: tuple[int, int], name: Filter) -> None:
    """libmtmd's own resizing changes boxes and recognized texts (ggml-org/llama.cpp#16842, #16880)."""
    for seed in range(4):
        pixels = random_picture(*old, seed)
        assert np.array_equal(resized(pixels, *new, name), expected(pixels, *new, name)), seed


def check_random_sizes(first: int, count: int) -> None:
    for case in range(first, first + count):
        random = Random(case)
        name = random.choice(list(FILTERS))
        old, new = ([_side(random), _side(random)] for _ in range(2))
        if case % 4 == 0:
            new = [side * random.randrange(1, 5) for side in old]
        elif case % 4 == 1:
            old = [side * random.randrange(1, 9) for side in new]
        pixels = random_picture(old[0], old[1], case)
        found = resized(pixels, new[0], new[1], name)
        assert np.array_equal(found, expected(pixels, new[0], new[1], name)), (case, old, new, name)


def _side(random: Random) -> int:
    near, far, tiles = random.randrange(1, 24), random.randrange(1, 500), 14 * random.randrange(1, 24)
    return random.choice((1, 2, near, near, far, far, 1 << random.randrange(9), tiles))


@pytest.mark.push
def test_random_sizes_are_resized_as_by_pillow() -> None:
    check_random_sizes(0, 300)


@pytest.mark.night
@pytest.mark.parametrize("first", range(300, 10_300, 1_000))
def test_thousands_of_sizes_are_resized_as_by_pillow(first: int) -> None:
    check_random_sizes(first, 1_000)


def test_coefficients_are_the_same_on_every_machine() -> None:
    """The digest would change with fused operations, or with the sine of a C library."""
    digest = hashlib.sha256()
    for name, old, new in product(FILTERS, (1, 7, 640, 4_032), (1, 9, 448, 896)):
        first, coefficients = resampling._coefficients(old, new, name)
        assert np.array_equal(coefficients, coefficients.astype(np.int32))
        digest.update(first.astype("<i4").tobytes() + coefficients.astype("<i4").tobytes())
    assert digest.hexdigest() == "759020cf8bcf5a787d4caad9c657fb0638d603f03de3f9477ab4ac1c622fffa2"


def test_the_sine_is_as_exact_as_float64() -> None:
    at = np.linspace(-3, 3, 4_999)
    right = [sin(pi * one) / (pi * one) if one else 1.0 for one in at]
    assert np.abs(resampling._sinc(at) - right).max() < 4e-16


def test_tiles_are_cut_from_scaled_pictures() -> None:
    """Idefics3 stretches the image to its longest edge first, and then to a multiple of the tiles' size."""
    pixels = np.asarray(picture())
    longest = Scaled(80, 48, Filter.LANCZOS, ())
    grid = Scaled(64, 32, Filter.LANCZOS, (Box(0, 0, 32, 32), Box(32, 0, 64, 32)), source=0)
    overview = Scaled(32, 32, Filter.BILINEAR, (Box(0, 0, 32, 32),))
    left, right, whole = tiles(pixels, [longest, grid, overview])
    twice = resized(resized(pixels, 80, 48, Filter.LANCZOS), 64, 32, Filter.LANCZOS)
    assert np.array_equal(np.concatenate([left, right], axis=1), twice)
    assert np.array_equal(whole, resized(pixels, 32, 32, Filter.BILINEAR))


def test_an_image_of_the_right_size_is_unchanged() -> None:
    pixels = np.asarray(picture())
    for name in FILTERS:
        [tile] = tiles(pixels, [Scaled(40, 24, name, (Box(0, 0, 40, 24),))])
        assert np.array_equal(tile, pixels)
