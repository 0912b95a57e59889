"""Tests of the kernels for the rows of images against NumPy, at every level, with odd widths."""

from __future__ import annotations

import numpy as np
import pytest

from llmrun.backends.cpu.lowering import float_word
from llmrun.base.compiled.kernel import KernelName
from llmrun.formats.layouts import records
from llmrun.formats.layouts.arena import address_of
from llmrun.model.plan.ops.embedding import AddImages, ImageWords, PlaceImages
from llmrun.model.plan.twin import ImageInputs, Run, Value
from tests.support.kernels.runs import LEVELS_HERE, padded_rows, run_kernel

pytestmark = pytest.mark.push


@pytest.mark.parametrize("level", LEVELS_HERE)
@pytest.mark.parametrize("width", [1, 15, 64, 100])
@pytest.mark.parametrize("is_image", [[True], [False], [False, True, True, False, True], [True] * 200])
def test_only_the_rows_of_images_change_like_the_twin(level: str, width: int, is_image: list[bool]) -> None:
    drawn, count = np.random.default_rng(width), sum(is_image)
    x = drawn.standard_normal((len(is_image), width)).astype(np.float32)
    embeds = drawn.standard_normal((count, 3 * width)).astype(np.float32)
    value, tokens = Value(width), np.where(is_image, -1, 5).astype(np.int32)
    addresses = np.zeros(len(is_image), np.int64)
    addresses[is_image] = address_of(embeds) + embeds.strides[0] * np.arange(count)
    for op, kernel in ((PlaceImages(0.75, value), "place_images"), (AddImages(2, value), "add_images")):
        run = Run([], tokens, lambda matrix, rows: rows, None, images=ImageInputs(embeds))
        run.values[value] = x
        op.twin(run)
        for step_images, expected in ((address_of(addresses), run.values[value]), (0, x)):
            out = padded_rows(x)
            part, scale = (0, op.scale) if isinstance(op, PlaceImages) else (op.part, 1.0)
            words = ImageWords(address_of(out), out.strides[0], width, 4 * part * width, float_word(scale))
            step = {records.STEP_ROWS: len(x), records.STEP_IMAGES: step_images}
            run_kernel(KernelName.of("rows.images", kernel), words, step, level=level, threads=2)
            np.testing.assert_array_equal(out[:, :width], expected)
            assert not out[:, width:].any(), "the padding of a row must stay zero"
