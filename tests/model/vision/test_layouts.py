"""Tests of layouts: sizes, filters, tiles and texts, against figures of the models' own processors.

`scripts/compare_images --record` writes the figures, which are computed by Hugging Face transformers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from llmrun.base.errors import UsageError
from llmrun.formats.images.scaling import Filter
from llmrun.model.vision.family import Limits, Sizes
from llmrun.model.vision.layout import ImageLayout, Rows, Words
from llmrun.model.vision.projector import FAMILIES, FAMILY_NAMES
from llmrun.model.vision.tiled import closest_grid
from tests.support.vision.layouts import image_sizes, steps_of, text_of
from tests.support.vision.projectors import TINY_PROJECTORS

PROCESSORS: dict[str, dict[str, dict[str, Any]]] = json.loads(Path(__file__).with_name("processors.json").read_text())
REFUSED_ONLY_BY_TRANSFORMERS = "must contain 'height' and 'width' keys"  # a side of 0 pixels

Layout = Callable[..., ImageLayout]


def layout_of(name: str, least: int | None = None, most: int | None = None) -> Layout:
    """Return the function that lays out images for the published sizes of a family."""
    row = TINY_PROJECTORS[name]
    sizes = Sizes(row.image_size, row.patch_size, row.merge, row.keys.get("preproc_image_size", 0))
    made = FAMILIES[name](sizes, Limits(least, most))
    return lambda width, height, detail="auto": made.layout(width, height, detail)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_layouts_are_those_of_the_processors(name: str) -> None:
    layout, seen = layout_of(name), 0
    assert len(PROCESSORS[name]) >= 45
    for size, expected in PROCESSORS[name].items():
        width, height = map(int, size.split("x"))
        if "error" not in expected:
            made = layout(width, height)
            assert {"text": text_of(made), "steps": steps_of(made)} == expected, size
            seen += 1
        elif REFUSED_ONLY_BY_TRANSFORMERS not in expected["error"]:
            with pytest.raises(UsageError, match="too narrow"):
                layout(width, height)
    assert seen >= 30


def layouts_of(name: str, layout: Layout) -> list[ImageLayout]:
    """Return layouts of random sizes that the family can read."""
    layouts = []
    for width, height in image_sizes(random.Random(name), 60):
        if not name.startswith("qwen") or max(width, height) <= 200 * min(width, height):
            layouts += [layout(width, height, detail) for detail in ("low", "auto", "high")]
    return layouts


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_each_tile_has_its_rows(name: str) -> None:
    for layout in layouts_of(name, layout_of(name)):
        rows = [piece for piece in layout.pieces if isinstance(piece, Rows)]
        boxes = sum(len(scaled.boxes) for scaled in layout.scaled)
        assert [piece.tile for piece in rows] == list(range(boxes))
        breaks = (lambda ny: ny - 1) if name == "pixtral" else (lambda ny: 0)
        assert all(piece.count == piece.nx * piece.ny + breaks(piece.ny) > 0 for piece in rows)
        assert layout.rows == sum(piece.count for piece in rows)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_boxes_cut_the_image_without_gaps(name: str) -> None:
    for layout in layouts_of(name, layout_of(name)):
        for number, scaled in enumerate(layout.scaled):
            assert -1 <= scaled.source < number
            area = sum((box.right - box.left) * (box.bottom - box.top) for box in scaled.boxes)
            assert area == (scaled.width * scaled.height if scaled.boxes else 0)
            assert len(set(scaled.boxes)) == len(scaled.boxes)
            assert all(
                0 <= box.left < box.right <= scaled.width and 0 <= box.top < box.bottom <= scaled.height
                for box in scaled.boxes
            )


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_texts_are_never_adjacent_or_empty(name: str) -> None:
    for layout in layouts_of(name, layout_of(name)):
        words = [piece.text if isinstance(piece, Words) else None for piece in layout.pieces]
        assert "" not in words
        assert not any(a is not None and b is not None for a, b in pairwise(words))


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_details_are_ordered(name: str) -> None:
    layouts = layouts_of(name, layout_of(name))
    for low, auto, high in zip(layouts[::3], layouts[1::3], layouts[2::3], strict=True):
        assert low.rows <= auto.rows <= high.rows


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_no_tile_has_more_rows_than_announced(name: str) -> None:
    row = TINY_PROJECTORS[name]
    sizes = Sizes(row.image_size, row.patch_size, row.merge, row.keys.get("preproc_image_size", 0))
    for limits in (Limits(), Limits(most=1500), Limits(least=200), Limits(least=3500)):
        if limits.least and not name.startswith(("qwen", "lfm2", "pixtral")):
            continue
        made = FAMILIES[name](sizes, limits)
        layouts = layouts_of(name, made.layout)
        assert max(p.count for made in layouts for p in made.pieces if isinstance(p, Rows)) <= made.most_rows


@pytest.mark.parametrize("name", [name for name in FAMILY_NAMES if name != "gemma3"])
@pytest.mark.parametrize("most", [300, 1000])
def test_the_most_tokens_limit_common_images(name: str, most: int) -> None:
    layout = layout_of(name, most=most)
    for width, height in ((640, 480), (3000, 4000), (1920, 1080), (500, 500)):
        assert 0 < layout(width, height, "high").rows <= most


@pytest.mark.parametrize("name", ["qwen3vl_merger", "qwen2.5vl_merger", "pixtral", "lfm2"])
def test_the_least_tokens_enlarge_small_images(name: str) -> None:
    small = layout_of(name)(100, 60).rows
    layout = layout_of(name, least=200)
    assert small < 200 <= layout(100, 60).rows < 240
    assert layout(100, 60, "low").rows < 240


@pytest.mark.parametrize("name", ["qwen3vl_merger", "lfm2"])
def test_low_detail_does_not_enlarge_narrow_images(name: str) -> None:
    layout = layout_of(name)
    assert layout(17, 2240, "low").rows == layout(17, 2240).rows == 70


def test_idefics3_has_a_longest_edge() -> None:
    layout = FAMILIES["idefics3"](Sizes(512, 16, 4, 6144), Limits()).layout(1000, 500, "auto")
    assert [(scaled.width, scaled.height) for scaled in layout.scaled] == [(4096, 2048), (4096, 2048), (512, 512)]


def test_idefics3_takes_longer_edges_for_the_least_tokens() -> None:
    layout = layout_of("idefics3", least=300)
    assert layout(500, 500, "low").rows == 320
    assert layout_of("idefics3")(500, 500, "low").rows == 64


@pytest.mark.parametrize(
    ("name", "least", "most", "words"),
    [
        ("gemma3", None, 255, "image_max_tokens is 255, but images need 256 tokens"),
        ("gemma3", 300, None, "image_min_tokens is 300, but images have at most 256 tokens"),
        ("gemma4v", 300, 400, "70, 140, 280, 560 or 1120 tokens"),
        ("gemma4uv", None, 60, "70, 140, 280, 560 or 1120 tokens"),
        ("idefics3", None, 63, "image_max_tokens is 63, but images need 64 tokens"),
        ("internvl", None, 200, "image_max_tokens is 200, but images need 256 tokens"),
        ("internvl", 5000, None, "image_min_tokens is 5,000, but images have at most 3,328 tokens"),
        ("internvl", 300, 400, "no image has 300 to 400 tokens"),
        ("qwen3vl_merger", 500, 400, "image_min_tokens is 500, but image_max_tokens is only 400"),
        ("pixtral", 0, None, "image_min_tokens must be at least 1, not 0"),
    ],
)
def test_limits_that_cannot_be_met_are_refused(name: str, least: int | None, most: int | None, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        layout_of(name, least, most)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("least", "most", "budgets"),
    [(None, None, (70, 280, 1120)), (None, 280, (70, 280, 280)), (500, None, (560, 560, 1120)), (100, 200, (140,) * 3)],
)
def test_gemma_4_keeps_to_its_budgets(least: int | None, most: int | None, budgets: tuple[int, ...]) -> None:
    """The budgets were wrong in other programs: ggml-org/llama.cpp#28318 and #28335."""
    layout = layout_of("gemma4v", least, most)
    for detail, budget in zip(("low", "auto", "high"), budgets, strict=True):
        for width, height in ((1024, 768), (30, 40), (8000, 6000), (7000, 100)):
            assert 0.7 * budget <= layout(width, height, detail).rows <= budget


def test_small_and_narrow_images_are_stretched() -> None:
    """Padded small images and the positions of narrow ones were wrong in ggml-org/llama.cpp#17290."""
    tiny, narrow = layout_of("qwen3vl_merger")(1, 1), layout_of("qwen3vl_merger")(10, 1500)
    assert (tiny.width, tiny.height, tiny.rows) == (256, 256, 64)
    assert (narrow.width, narrow.height) == (32, 3136)
    assert [(piece.nx, piece.ny) for piece in narrow.pieces if isinstance(piece, Rows)] == [(1, 98)]


@pytest.mark.parametrize("name", ["qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger"])
def test_too_narrow_images_are_refused_with_a_hint(name: str) -> None:
    layout = layout_of(name)
    assert layout(200, 1).rows > 0
    with pytest.raises(UsageError, match="201 x 1 pixels: one side may be at most 200 times the other") as caught:
        layout(201, 1)
    assert caught.value.hint == "crop the image"


def test_narrow_sides_of_pixtral_have_a_pixel() -> None:
    layout = layout_of("pixtral")(1, 10000)
    assert (layout.width, layout.height, layout.rows) == (28, 1540, 2 * 55 - 1)


def test_large_grids_need_large_images() -> None:
    assert closest_grid(448, 896, 448, 1, 12) == (1, 2)
    assert closest_grid(896, 1792, 448, 1, 12) == (2, 4)


def test_filters_are_those_of_the_models() -> None:
    filters = {name: {scaled.filter for scaled in layout_of(name)(3000, 2000).scaled} for name in FAMILY_NAMES}
    bilinear, lanczos = ("gemma3", "lfm2"), ("idefics3",)
    assert all(filters.pop(name) == {Filter.BILINEAR} for name in bilinear)
    assert all(filters.pop(name) == {Filter.LANCZOS} for name in lanczos)
    assert set.union(*filters.values()) == {Filter.BICUBIC}
