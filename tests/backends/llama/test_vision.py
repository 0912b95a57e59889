"""Tests that llama.cpp reads images: the encoder's pixels and rows, and logits after images, are libmtmd's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.backends.base import OpenOptions
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.base.errors import Cancelled, KVFull, LlmrunError, ModelFileError, UsageError
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.vision.layout import ImageLayout, Rows
from tests.support.vision.mtmd_oracle import seen_by_libmtmd
from tests.support.vision.opened import SMALL, encode, encoded, open_vision, vision_of
from tests.support.vision.projectors import TINY_PROJECTORS, tiny_projector, tiny_text_model
from tests.support.vision.prompts import Image, joined, part_of, picture, prompt_batch, tiles_of

pytestmark = pytest.mark.push

BEFORE, AFTER = [5, 6, 7, 8], [9, 10, 11]


def logits(backend: LlamaBackend, parts: list[list[int] | Image], **options: Any) -> np.ndarray[Any, Any]:
    return backend.forward(prompt_batch(vision_of(backend).projector, parts, **options)).logits


def assert_close(actual: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=0.005 * float(np.ptp(expected)))


@pytest.mark.parametrize("name", TINY_PROJECTORS)
def test_pixels_rows_and_logits_are_libmtmds(tmp_path: Path, name: str) -> None:
    """libmtmd resizes nothing, and its own helper gives the same logits for the text after an image."""
    backend = open_vision(tmp_path, name)
    projector = vision_of(backend).projector
    layout = projector.layout(300, 200)
    image = encoded(backend, layout)
    pixels = tiles_of(layout)[0]
    seen = seen_by_libmtmd(
        Path(backend.info.path), projector.path, pixels, projector.most_rows, before=BEFORE, after=AFTER
    )
    mean, deviation = np.array([0.45, 0.51, 0.38], np.float32), np.array([0.27, 0.31, 0.24], np.float32)
    expected = ((pixels.astype(np.float32) / 255 - mean) / deviation).transpose(2, 0, 1)
    np.testing.assert_allclose(seen.pixels, expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(image.rows, seen.rows)
    actual = logits(backend, [BEFORE, image, AFTER], wanted=len(AFTER))
    np.testing.assert_allclose(actual, seen.logits, rtol=0, atol=1e-4 * float(np.ptp(seen.logits)))
    if projector.uses_mrope:
        assert seen.end == len(BEFORE) + max(image.piece.nx, image.piece.ny)
    backend.close()


@pytest.mark.parametrize("name", TINY_PROJECTORS)
def test_images_have_the_promised_rows(tmp_path: Path, name: str) -> None:
    limits = {} if name in SMALL or name == "lfm2" else {"image_max_tokens": 80}
    backend = open_vision(tmp_path, name, **limits)
    vision = vision_of(backend)
    for width, height in [(1, 1), (1, 3000), (3000, 1), (33, 35), (481, 1999), (6000, 4000)]:
        if vision.projector.uses_mrope and max(width, height) > 200 * min(width, height):
            with pytest.raises(UsageError, match="too narrow"):
                vision.projector.layout(width, height)
            continue
        layout = vision.projector.layout(width, height)
        rows = encode(vision, tiles_of(layout), layout)
        assert rows.shape == (layout.rows, vision.projector.row_width)
        assert np.isfinite(rows).all()
    backend.close()


@pytest.mark.parametrize("name", ["idefics3", "lfm2", "internvl"])
def test_rows_have_the_order_of_their_pieces(tmp_path: Path, name: str) -> None:
    backend = open_vision(tmp_path, name)
    vision = vision_of(backend)
    layout = vision.projector.layout(900, 600)
    pieces, tiles = [piece for piece in layout.pieces if isinstance(piece, Rows)], tiles_of(layout)
    assert len(pieces) == len(tiles) > 2
    rows, start = encode(vision, tiles, layout), 0
    for piece in pieces:
        alone = ImageLayout((piece,), layout.scaled, layout.width, layout.height)
        np.testing.assert_array_equal(rows[start : start + piece.count], encode(vision, tiles, alone))
        start += piece.count
    backend.close()


@pytest.fixture(scope="module", params=["gemma3", "qwen3vl_merger", "qwen3vl_merger qwen35", "pixtral"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaBackend]:
    """A backend of each kind: images with a two-way mask, M-RoPE, M-RoPE with a recurrent state, and plain images."""
    opened = open_vision(tmp_path_factory.mktemp("vision"), request.param, max_sequences=4, saves_state=True)
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def _empty(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "backend" in request.fixturenames:
        opened = request.getfixturevalue("backend")
        for seq in range(4):
            opened.kv.free(seq)


def small_image(backend: LlamaBackend, seed: int = 0) -> Image:
    return encoded(backend, vision_of(backend).projector.layout(220, 120), seed)


def test_the_same_pixels_give_the_same_rows(backend: LlamaBackend) -> None:
    first, other, again = (small_image(backend, seed).rows for seed in (0, 1, 0))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.01


def test_a_prompt_can_be_run_in_parts(backend: LlamaBackend) -> None:
    """Images with a two-way mask must be in one part; others can be split anywhere."""
    projector, image = vision_of(backend).projector, small_image(backend)
    batch = prompt_batch(projector, [BEFORE, image, AFTER, image, AFTER])
    expected = backend.forward(batch).logits
    n, count = len(batch.tokens), image.piece.count
    middle = [len(BEFORE) + count // 2] if projector.is_causal else []
    cuts = [0, 2, *middle, len(BEFORE) + count, len(BEFORE) + count + len(AFTER), n - 1, n]
    backend.kv.free(0)
    for start, end in pairwise(cuts):
        actual = backend.forward(part_of(batch, start, end, wanted=1)).logits
    assert_close(actual, expected)
    assert backend.kv.lengths[0] == n


def test_sequences_with_and_without_images_run_together(backend: LlamaBackend) -> None:
    projector, image, other = vision_of(backend).projector, small_image(backend), small_image(backend, 1)
    prompts: list[list[list[int] | Image]] = [
        [BEFORE, image, AFTER],
        [AFTER, BEFORE],
        [image, AFTER, other, BEFORE],
        [other, image, AFTER],
    ]
    batches = [prompt_batch(projector, prompt, seq=seq) for seq, prompt in enumerate(prompts)]
    expected = [backend.forward(batch).logits for batch in batches]
    for seq in range(4):
        backend.kv.free(seq)
    actual = backend.forward(joined(batches)).logits
    assert_close(actual, np.concatenate(expected))


def goes_back(backend: LlamaBackend) -> bool:
    return backend.info.architecture != "qwen35"


def test_sequences_are_truncated_at_images(backend: LlamaBackend) -> None:
    projector, image = vision_of(backend).projector, small_image(backend)
    batch = prompt_batch(projector, [BEFORE, image, AFTER, image, AFTER])
    expected = backend.forward(batch).logits
    n, start, count = len(batch.tokens), len(BEFORE), image.piece.count
    second = start + count + len(AFTER)
    for cut, border in [
        *((n - 1, n - 1), (second + count, second + count), (second + 3, second), (second, second)),
        *((second - 1, second - 1), (start + count, start + count), (start + 1, start), (start, start), (2, 2)),
    ]:
        kept = backend.kv.truncate(0, cut)
        if goes_back(backend):
            assert kept == (border if projector.uses_mrope else cut)
        assert backend.kv.lengths[0] == kept
        assert_close(backend.forward(part_of(batch, kept, wanted=1)).logits, expected)


def test_copies_of_sequences_end_at_images(backend: LlamaBackend) -> None:
    projector, image = vision_of(backend).projector, small_image(backend)
    batch = prompt_batch(projector, [BEFORE, image, AFTER])
    expected = backend.forward(batch).logits
    n, start = len(batch.tokens), len(BEFORE)
    for asked in (n, n - 1, start + image.piece.count, start + 1, start):
        kept = backend.kv.copy(0, 1, asked)
        inside = projector.uses_mrope and start < asked < start + image.piece.count
        if goes_back(backend):
            assert kept == (start if inside else asked)
        if kept < n:
            rest = part_of(batch, kept, wanted=1)
            assert_close(backend.forward(replace(rest, seq=np.ones_like(rest.seq))).logits, expected)
        assert backend.kv.lengths[:2] == [n, n]
    following = prompt_batch(projector, [BEFORE, image, [*AFTER, 12]])
    actual, again = (
        backend.forward(replace(part_of(following, n), seq=np.full(1, seq, np.int32))).logits for seq in (0, 1)
    )
    assert_close(again, actual)


def test_saved_sequences_with_images_are_loaded(backend: LlamaBackend) -> None:
    projector, image = vision_of(backend).projector, small_image(backend)
    batch = prompt_batch(projector, [BEFORE, image, AFTER, image, [*AFTER, 12]])
    n = len(batch.tokens) - 1
    backend.forward(part_of(batch, 0, n))
    parts = [replace(part, read=partial(bytes, bytes(part.read()))) for part in backend.kv.save(0, n)]
    expected = backend.forward(part_of(batch, n)).logits
    assert backend.kv.load(1, parts) == n
    rest = part_of(batch, n)
    assert_close(backend.forward(replace(rest, seq=np.ones_like(rest.seq))).logits, expected)
    if goes_back(backend):
        start = len(BEFORE)
        kept = backend.kv.truncate(1, start + 1)
        assert kept == (start if projector.uses_mrope else start + 1)
        rest = part_of(batch, kept, wanted=1)
        assert_close(backend.forward(replace(rest, seq=np.ones_like(rest.seq))).logits, expected)


def test_a_cancelled_prompt_leaves_a_usable_sequence(backend: LlamaBackend) -> None:
    projector, image = vision_of(backend).projector, small_image(backend)
    batch = prompt_batch(projector, [BEFORE, image, AFTER])
    expected = backend.forward(batch).logits
    backend.kv.free(0)
    backend.forward(part_of(batch, 0, 2, wanted=0))
    backend.cancel()
    with pytest.raises(Cancelled):
        backend.forward(part_of(batch, 2))
    kept = backend.kv.truncate(0, 2)
    assert_close(backend.forward(part_of(batch, kept, wanted=1)).logits, expected)


@pytest.mark.night
def test_stopping_inside_an_image_keeps_what_is_before(tmp_path: Path) -> None:
    """llama.cpp then removes all rows with the image's position, including those of earlier passes."""
    projector = tiny_projector(tmp_path, "qwen2vl_merger")
    options = OpenOptions(context_size=2048, threads=1, gpu_layers=0, mmproj=str(projector))
    with open_gguf(tiny_text_model(tmp_path, "qwen2vl_merger", layers=40)) as file:
        backend = LlamaBackend(file, options)
    vision = vision_of(backend)
    image = encoded(backend, vision.projector.layout(800, 700))
    batch = prompt_batch(vision.projector, [BEFORE, image, AFTER])
    expected = backend.forward(batch).logits
    backend.kv.free(0)
    backend.forward(part_of(batch, 0, 100, wanted=0))
    threading.Timer(0.1, backend.cancel).start()  # out of half a second
    with pytest.raises(Cancelled):
        backend.forward(part_of(batch, 100))
    assert backend.kv.truncate(0, 100) == len(BEFORE)
    assert_close(backend.forward(part_of(batch, len(BEFORE))).logits, expected)
    backend.close()


@pytest.mark.parametrize("name", ["qwen2vl_merger", "gemma3"])
def test_an_image_without_room_leaves_a_prefix(tmp_path: Path, name: str) -> None:
    """The cache fills up inside an image, of which llama.cpp has stored a part."""
    backend = open_vision(tmp_path, name, context_size=1024, max_sequences=2, kv_tokens=1024)
    projector = vision_of(backend).projector
    layout = projector.layout(900, 700) if projector.uses_mrope else projector.layout(1, 1)
    image = encoded(backend, layout)
    filling = 1024 - len(BEFORE) - image.piece.count // 2
    backend.forward(prompt_batch(projector, [[5] * filling], seq=1))
    batch = prompt_batch(projector, [BEFORE, image, AFTER])
    backend.forward(part_of(batch, 0, 4, wanted=0))
    with pytest.raises(KVFull, match="KV cache is full"):
        backend.forward(part_of(batch, 4))
    assert backend.kv.truncate(0, 4) == 4
    backend.kv.free(1)
    actual = backend.forward(part_of(batch, 4)).logits
    backend.kv.free(0)
    assert_close(actual, backend.forward(batch).logits)
    backend.close()


def test_a_tile_of_another_size_is_refused(tmp_path: Path) -> None:
    backend = open_vision(tmp_path, "pixtral")
    vision = vision_of(backend)
    layout = vision.projector.layout(280, 140)
    with pytest.raises(LlmrunError, match="a tile of 140x280 pixels has 59 rows, expected 54"):
        encode(vision, [picture(140, 280)], layout)
    backend.close()


def test_a_projector_for_another_model_is_refused(tmp_path: Path) -> None:
    projector = tiny_projector(tmp_path, "gemma3", text_width=64)
    options = OpenOptions(context_size=256, threads=1, gpu_layers=0, mmproj=str(projector))
    with open_gguf(tiny_text_model(tmp_path, "gemma3")) as file, pytest.raises(ModelFileError) as caught:
        LlamaBackend(file, options)
    assert str(projector) in str(caught.value)


def test_invalid_batches_with_images_are_refused(backend: LlamaBackend) -> None:
    projector, image = vision_of(backend).projector, small_image(backend)
    batch = prompt_batch(projector, [BEFORE, image, AFTER])
    assert batch.embeds is not None
    wrong = [
        replace(batch, embeds=None),
        replace(batch, embeds=batch.embeds[1:]),
        replace(batch, embeds=batch.embeds[:, 1:]),
        replace(batch, want=np.full_like(batch.want, 2)),
    ]
    if projector.uses_mrope:
        assert batch.rope_pos is not None
        wrong += [replace(batch, rope_pos=None), replace(batch, rope_pos=batch.rope_pos + 1)]
        wrong += [replace(batch, rope_pos=-batch.rope_pos)]
    if not projector.is_causal:
        assert batch.ahead is not None
        wrong += [replace(batch, ahead=batch.ahead + 1), replace(batch, ahead=batch.ahead[::-1])]
        cut = part_of(batch, 0, len(BEFORE) + 2)
        wrong.append(cut)
    for each in wrong:
        with pytest.raises(ValueError, match=r"\w"):
            backend.forward(each)
        assert backend.kv.lengths[0] == 0
    assert len(backend.forward(batch).logits) == 1
