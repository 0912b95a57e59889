"""Tests of decoding: a corpus of generated files, in this process, and the child process with its limits."""

from __future__ import annotations

import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image, ImageOps

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.base.processes import commands
from llmrun.formats.images import decoding
from llmrun.formats.images.decoding import ImageDecoder
from llmrun.formats.images.header import MOST_PIXELS, read_header
from llmrun.formats.images.scaling import Box, Filter, Scaled
from llmrun.formats.images.worker import decoded
from tests.soak.driver import run_profile
from tests.support.images.files import LOSSLESS, SAVED, Picture, chunk, picture, png, saved, saved_as

WHITE = (255, 255, 255)


def pixels_of(data: bytes) -> Picture:
    """Decode in this process."""
    return decoded(data, read_header(data, "cat"))


def grey_pixels(data: bytes) -> list[int]:
    """Return the levels of an image without colors."""
    pixels = pixels_of(data)
    assert (pixels == pixels[..., :1]).all()
    return [int(level) for level in pixels[..., 0].ravel()]


# --- the corpus -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOSSLESS)
def test_lossless_files_give_their_pixels(kind: str) -> None:
    assert np.array_equal(pixels_of(saved(picture(), kind, **LOSSLESS[kind])), np.asarray(picture()))


@pytest.mark.parametrize("name", SAVED)
def test_all_formats_give_about_the_same_picture(name: str) -> None:
    """WebP crashed, or was refused, in abetlen/llama-cpp-python#1140 and ollama/ollama#2457 and #7388."""
    difference = pixels_of(saved_as(name)).astype(int) - np.asarray(picture())
    assert np.abs(difference).mean() < 25


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "JPEG"])
def test_images_are_turned_as_their_exif_data_says(kind: str, orientation: int) -> None:
    """Photos of phones lay on their side in ggml-org/llama.cpp#20870 and ollama/ollama#18418."""
    stored = picture()
    stored.getexif()[0x0112] = orientation
    right = np.asarray(ImageOps.exif_transpose(stored))
    found = pixels_of(saved(picture(), kind, orientation=orientation, **LOSSLESS.get(kind, {})))
    assert found.shape == right.shape
    assert np.abs(found.astype(int) - right).mean() < (25 if kind == "JPEG" else 1e-9)
    assert found.flags.c_contiguous


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_transparent_pixels_are_shown_on_white(kind: str) -> None:
    """If alpha is dropped, dark text stands on black (NousResearch/hermes-agent#64548)."""
    image = Image.new("RGBA", (3, 1))
    image.putdata([(9, 9, 9, 0), (9, 9, 9, 255), (100, 0, 200, 128)])
    found = pixels_of(saved(image, kind, **LOSSLESS[kind]))
    blended = tuple(round((color * 128 + 255 * 127) / 255) for color in (100, 0, 200))
    assert found.tolist() == [[list(WHITE), [9, 9, 9], list(blended)]]


def test_grey_with_alpha_is_shown_on_white() -> None:
    assert grey_pixels(png(3, 1, 8, 4, [bytes([0, 0, 0, 255, 50, 51])])) == [255, 0, round((50 * 51 + 255 * 204) / 255)]


def test_palettes_with_transparent_colors_are_shown_on_white() -> None:
    image = Image.new("P", (3, 1))
    image.putpalette([1, 2, 3, 4, 5, 6, 7, 8, 9])
    image.putdata([0, 1, 2])
    for kind in ("PNG", "GIF"):
        found = pixels_of(saved(image, kind, transparency=1))
        assert found.tolist() == [[[1, 2, 3], list(WHITE), [7, 8, 9]]], kind
    half = pixels_of(saved(image, "PNG", transparency=bytes([255, 0, 128])))
    assert half.tolist() == [[[1, 2, 3], list(WHITE), [(value * 128 + 255 * 127 + 127) // 255 for value in (7, 8, 9)]]]


@pytest.mark.parametrize(
    ("depth", "row", "key", "levels"),
    [
        (1, b"\xa0", 1, [255, 0, 255, 0]),
        (1, b"\xa0", 0, [255, 255, 255, 255]),
        (2, b"\x1b", 2, [0, 85, 255, 255]),
        (4, b"\x12\x34", 2, [17, 255, 51, 68]),
        (8, b"\x01\x02\x03\x04", 2, [1, 255, 3, 4]),
        (16, struct.pack(">4H", 512, 513, 514, 600), 513, [2, 255, 2, 2]),
    ],
)
def test_a_transparent_level_is_white(depth: int, row: bytes, key: int, levels: list[int]) -> None:
    """The level in the file has the file's own depth, while Pillow scales the pixels to 8 bits."""
    assert grey_pixels(png(4, 1, depth, 0, [row], [chunk(b"tRNS", struct.pack(">H", key))])) == levels


@pytest.mark.parametrize("depth", [8, 16])
def test_a_transparent_color_is_white(depth: int) -> None:
    row = struct.pack(">6B" if depth == 8 else ">6H", 9, 8, 7, 9, 8, 6)
    found = pixels_of(png(2, 1, depth, 2, [row], [chunk(b"tRNS", struct.pack(">3H", 9, 8, 7))]))
    assert found[0, 0].tolist() == list(WHITE)
    assert found[0, 1].tolist() == ([9, 8, 6] if depth == 8 else [0, 0, 0])


@pytest.mark.parametrize("color", [0, 2, 4, 6])
def test_16_bit_samples_are_divided_by_257(color: int) -> None:
    """Pillow clips grey samples, so that nearly everything is white, and drops the low bytes of colors."""
    samples = np.array([0, 1, 128, 129, 255, 256, 257, 0x1234, 0x80FF, 0xFF00, 0xFFFF], dtype=">u2")
    channels = {0: 1, 2: 3, 4: 2, 6: 4}[color]
    row = np.repeat(samples[:, None], channels, axis=1)
    if color >= 4:
        row[:, -1] = 0xFFFF
    found = grey_pixels(png(len(samples), 1, 16, color, [row.tobytes()]))
    assert found == [round(int(sample) / 257) for sample in samples]


def test_16_bit_alpha_is_divided_by_257() -> None:
    row = struct.pack(">4H", 0, 0x80FF, 0xFFFF, 0x00FF)
    assert grey_pixels(png(2, 1, 16, 4, [row])) == [255 - 0x80, 255]
    assert grey_pixels(png(1, 1, 16, 6, [struct.pack(">4H", 0, 0, 0, 0x80FF)])) == [255 - 0x80]


@pytest.mark.parametrize("color", [0, 2, 4, 6])
def test_interlaced_16_bit_images_are_read(color: int) -> None:
    """Pillow reads the rows of seven passes, which have fewer columns than the image."""
    channels = {0: 1, 2: 3, 4: 2, 6: 4}[color]
    samples = np.random.default_rng(color).integers(0, 1 << 16, (9, 11, channels), dtype=np.uint16)
    passes = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
    rows = [row.astype(">u2").tobytes() for y, x, dy, dx in passes for row in samples[y::dy, x::dx]]
    plain = png(11, 9, 16, color, [row.astype(">u2").tobytes() for row in samples])
    data = bytearray(png(11, 9, 16, color, rows))
    data[28] = 1
    data[29:33] = chunk(b"IHDR", bytes(data[16:29]))[-4:]
    assert np.array_equal(pixels_of(bytes(data)), pixels_of(plain))


def test_cmyk_is_converted() -> None:
    image = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    found = pixels_of(saved(image, "JPEG", quality=100))[0, 0]
    assert np.abs(found.astype(int) - (0, 255, 255)).max() < 5


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_grey_is_converted(kind: str) -> None:
    found = grey_pixels(saved(picture(), kind, "L", **LOSSLESS.get(kind, {})))
    assert np.abs(np.array(found) - np.asarray(picture().convert("L")).ravel()).mean() < 3


@pytest.mark.parametrize("name", ["PNG animated", "WebP animated", "GIF animated"])
def test_the_first_frame_of_an_animation_counts(name: str) -> None:
    data = saved_as(name)
    assert read_header(data, "cat").animated
    first = saved_as(name.removesuffix(" animated"))
    assert np.abs(pixels_of(data).astype(int) - pixels_of(first)).mean() < 25


def test_color_profiles_and_long_texts_are_ignored() -> None:
    """Pillow itself refuses compressed texts of more than 1 MB, which some programs write."""
    profile, text = b"icc\0\0" + b"x" * 50, b"Comment\0\0" + zlib.compress(bytes(2_000_000))
    data = png(1, 1, 8, 2, [b"\1\2\3"], [chunk(b"iCCP", profile), chunk(b"zTXt", text)])
    assert pixels_of(data).tolist() == [[[1, 2, 3]]]


def test_pillow_does_not_parse_metadata_of_jpeg_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Exif, "load", lambda *_: pytest.fail("parses EXIF data"))
    exif = saved(picture(), "JPEG", orientation=6, comment=b"cat", icc_profile=bytes(70_000))
    assert np.array_equal(pixels_of(exif), np.rot90(pixels_of(saved(picture(), "JPEG")), -1))


@pytest.mark.parametrize("size", [(1, 1), (1, 16_384), (16_384, 1), (2_000, 700)])
def test_narrow_and_large_images_are_read(size: tuple[int, int]) -> None:
    """The last size takes several bands."""
    assert np.array_equal(pixels_of(saved(picture(*size), "PNG")), np.asarray(picture(*size)))


def test_the_suffix_and_the_declared_type_do_not_matter() -> None:
    assert read_header(saved_as("JPEG"), "cat.png").format == "JPEG"


# --- the process ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoder() -> Iterator[ImageDecoder]:
    made = ImageDecoder()
    yield made
    made.close()


def scaled(width: int = 32, height: int = 32) -> list[Scaled]:
    return [Scaled(width, height, Filter.BICUBIC, (Box(0, 0, width, height),))]


def refused(decoder: ImageDecoder, data: bytes) -> str:
    with pytest.raises(UsageError) as caught:
        decoder.tiles(data, scaled(), "cat.png")
    return str(caught.value)


@pytest.mark.push
@pytest.mark.parametrize("name", SAVED)
def test_the_process_returns_tiles(decoder: ImageDecoder, name: str) -> None:
    halves = Scaled(64, 32, Filter.LANCZOS, (Box(0, 0, 32, 32), Box(32, 0, 64, 32)))
    found = decoder.tiles(saved_as(name), [halves, *scaled(5, 9)], "cat")
    assert [tile.shape for tile in found.tiles] == [(32, 32, 3), (32, 32, 3), (9, 5, 3)]
    assert len(found.pixels) == 32


@pytest.mark.push
def test_the_digest_is_that_of_the_pixels(decoder: ImageDecoder) -> None:
    """Two pictures must never share a key (sgl-project/sglang#11785, jundot/omlx#1417)."""
    files = [saved(picture(), kind, **options) for kind, options in LOSSLESS.items()]
    digests = {decoder.tiles(data, scaled(), "cat").pixels for data in files}
    assert len(digests) == 1
    turned = np.asarray(picture()).reshape(40, 24, 3)  # the same bytes in another size
    others = [saved(picture(), "JPEG"), saved(Image.fromarray(turned), "PNG")]
    assert len(digests | {decoder.tiles(data, scaled(), "cat").pixels for data in others}) == 3


@pytest.mark.push
def test_images_after_a_kill_are_decoded(decoder: ImageDecoder) -> None:
    """A cancel may come just after an image was decoded. The next image must not get the error, which is remembered."""
    for _ in range(3):
        decoder.tiles(saved(picture(), "PNG"), scaled(), "cat")
        decoder.kill()
    assert decoder.tiles(saved(picture(), "PNG"), scaled(), "cat").tiles


@pytest.mark.push
@pytest.mark.parametrize("name", SAVED)
def test_truncated_files_are_errors(decoder: ImageDecoder, name: str) -> None:
    data = saved_as(name, picture(200, 160))
    for share in (0.5, 0.9):
        assert refused(decoder, data[: int(len(data) * share)]) == "cat.png: the image file is truncated"


@pytest.mark.push
def test_mutated_files_end_in_pixels_or_one_line() -> None:
    """`scripts/soak images` runs as many as you like."""
    result = run_profile("images", count=200)
    assert result.broken == []
    assert result.counts["decoded"] >= 15
    assert len(result.counts) >= 15


@pytest.mark.push
def test_broken_files_get_a_reason(decoder: ImageDecoder) -> None:
    broken = bytearray(png(4, 4, 8, 0, [b"1234"] * 4))
    broken[broken.index(b"IDAT") + 20] ^= 1  # the last byte of a checksum
    assert refused(decoder, bytes(broken)) == "cat.png: invalid PNG file: the checksum of its IDAT chunk is wrong"
    assert refused(decoder, png(4, 4, 3, 0, [b"1234"] * 4)).startswith("cat.png: invalid PNG file: ")


@pytest.mark.push
def test_a_size_unlike_the_headers_is_an_error(decoder: ImageDecoder) -> None:
    """A second header would make a layout of the wrong size."""
    second = chunk(b"IHDR", struct.pack(">IIBBBBB", 900, 900, 8, 0, 0, 0, 0))
    reason = refused(decoder, png(4, 4, 8, 0, [b"1234"] * 4, [second]))
    assert reason == "cat.png: invalid PNG file: it has 900 x 900 pixels, unlike its header"


@pytest.mark.push
def test_one_process_decodes_many_images(decoder: ImageDecoder) -> None:
    decoder.tiles(saved_as("PNG"), scaled(), "cat")
    assert decoder._child is not None
    pid = decoder._child.pid
    for name in SAVED:
        refused(decoder, saved_as(name)[:60])
        decoder.tiles(saved_as("PNG"), scaled(), "cat")
    assert decoder._child.pid == pid


@pytest.mark.push
def test_a_killed_process_starts_again(decoder: ImageDecoder) -> None:
    first = decoder.tiles(saved_as("PNG"), scaled(), "cat")
    assert decoder._child is not None
    psutil.Process(decoder._child.pid).kill()
    decoder._child.wait(10)
    assert decoder.tiles(saved_as("PNG"), scaled(), "cat").pixels == first.pixels


@pytest.mark.push
def test_images_that_take_too_long_are_errors(decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A progressive JPEG file may repeat its scans thousands of times."""
    monkeypatch.setattr(decoding, "_CPU_S", 0.2)
    monkeypatch.setattr(decoding, "_CPU_S_PER_PIXEL", 0.0)
    monkeypatch.setattr(decoding, "_WALL_PER_CPU_S", 200)  # for busy machines
    data = saved(picture(1_500, 1_500), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    assert refused(decoder, data[:-2] + data[last:-2] * 4_000 + data[-2:]) == (
        "cat.png: the image cannot be decoded: it takes longer than 0.2 s"
    )


@pytest.mark.push
def test_images_that_need_too_much_memory_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_MEMORY", 230_000_000)
    monkeypatch.setattr(decoding, "_MEMORY_PER_PIXEL", {"PNG": 0})
    decoder = ImageDecoder()
    try:
        decoder.tiles(saved_as("PNG"), scaled(), "cat")
        assert refused(decoder, png(4_000, 4_000, 8, 2, [bytes(12_000)] * 4_000)) == (
            "cat.png: the image cannot be decoded: it needs more than 230 MB of memory"
        )
        decoder.tiles(saved_as("PNG"), scaled(), "cat")
    finally:
        decoder.close()


def largest() -> dict[str, bytes]:
    """Return files at the limit of pixels, in the variants that need the most memory."""
    side = int(MOST_PIXELS**0.5)
    noise = Image.effect_noise((1024, 1024), 20).resize((side, side), Image.Resampling.BILINEAR)
    flat = Image.new("RGB", (side, side), (3, 200, 40))
    options: dict[str, Any] = {"progressive": True, "quality": 50, "subsampling": 0}
    return {
        "PNG": saved(flat, "PNG"),
        "PNG, 16 bits": png(side, side, 16, 6, [b"\x12\x34\x56\x78" * 2 * side] * side),
        "JPEG": saved(noise, "JPEG", "CMYK", **options),
        "WebP": saved(noise, "WEBP", "RGBA", quality=10, method=0),
        "WebP lossless": saved(flat, "WEBP", "RGBA", lossless=True, method=0),
        "GIF": saved(flat, "GIF", "P"),
        "BMP": saved(flat, "BMP", "1"),
    }


@pytest.mark.night
def test_the_largest_images_stay_within_the_limits(decoder: ImageDecoder) -> None:
    for name, data in largest().items():
        found = decoder.tiles(data, scaled(896, 896), name)
        assert found.tiles[0].shape == (896, 896, 3)


@pytest.mark.push
@pytest.mark.parametrize(
    ("program", "error"),
    [("import sys; sys.exit(1)", LlmrunError), ("import os; os.abort()", UsageError)],
)
def test_a_process_that_dies_is_one_error(
    monkeypatch: pytest.MonkeyPatch, program: str, error: type[LlmrunError]
) -> None:
    """A file can crash a decoder, but a missing library is not the file's fault."""
    monkeypatch.setattr(commands, "isolated_command", lambda _: [sys.executable, "-c", program])
    with pytest.raises(LlmrunError, match="cat: ") as caught:
        ImageDecoder().tiles(saved_as("PNG"), scaled(), "cat")
    assert type(caught.value) is error


@pytest.mark.push
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xc1",
        b"\x92\xa7decoded\x01",
        b"\x92\xa7decoded\x92\xc4\x00\x90",
        b"\x92\xa7decoded\x92\xc4\x00\x91\xc4\x02ab",
    ],
)
def test_invalid_answers_are_errors(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    """A file that takes over the process cannot hand pictures of other sizes to the engine."""
    closed: list[ImageDecoder] = []
    monkeypatch.setattr(ImageDecoder, "_answer", lambda *_: answer)
    monkeypatch.setattr(ImageDecoder, "close", lambda decoder: closed.append(decoder))
    with pytest.raises(UsageError, match="cannot be decoded: its process sent an invalid answer"):
        ImageDecoder().tiles(saved_as("PNG"), scaled(), "cat")
    assert len(closed) == 1


@pytest.mark.push
def test_kill_ends_a_request_of_another_thread(decoder: ImageDecoder) -> None:
    """The image may belong to a request that has ended. The next one starts the process again."""
    decoder.tiles(saved_as("PNG"), scaled(), "cat")
    large, began = saved(Image.new("RGB", (8000, 8000)), "PNG"), time.monotonic()
    threading.Timer(0.3, decoder.kill).start()
    with pytest.raises(UsageError, match="cannot be decoded"):
        decoder.tiles(large, scaled(896, 896), "large")
    assert time.monotonic() - began < 3
    assert decoder.tiles(saved_as("PNG"), scaled(), "cat").tiles
