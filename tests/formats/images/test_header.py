"""Tests of the headers of image files."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from llmrun.base.errors import UsageError
from llmrun.formats.images.header import (
    LONGEST_SIDE,
    MOST_BYTES,
    MOST_PIXELS,
    ImageHeader,
    looks_like_image,
    read_header,
)
from tests.support.images.files import SAVED, chunk, picture, png, saved, saved_as

HEIF = b"\0\0\0\x1cftyp%s\0\0\0\0%s" + bytes(8)
# The first bytes of files that are refused, the name of the format, and the program in the hint.
REFUSED = {
    "HEIC": (HEIF % (b"heic", b"mif1heic"), "HEIC", "magick IN.heic"),
    "HEIC by its other brands": (HEIF % (b"mif1", b"mif1heic"), "HEIC", "magick IN.heic"),
    "AVIF": (HEIF % (b"avif", b"mif1avif"), "AVIF", "magick IN.avif"),
    "AVIF by its other brands": (HEIF % (b"mif1", b"mif1avif"), "AVIF", "magick IN.avif"),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG", "magick IN.svg"),
    "SVG after a declaration": (b'\xef\xbb\xbf<?xml version="1.0"?>\n<!-- cat -->\n<svg/>', "SVG", "magick IN.svg"),
    "TIFF": (b"II*\0" + bytes(60), "TIFF", "magick IN.tiff"),
    "TIFF, big-endian": (b"MM\0*" + bytes(60), "TIFF", "magick IN.tiff"),
    "PDF": (b"%PDF-1.7\n", "PDF", "pdftoppm"),
}


def refusal(data: bytes, place: str = "cat.png") -> UsageError:
    with pytest.raises(UsageError) as caught:
        read_header(data, place)
    return caught.value


@pytest.mark.parametrize("name", SAVED)
def test_headers_are_read(name: str) -> None:
    header = read_header(saved_as(name), "cat")
    assert header == ImageHeader(SAVED[name][0], 40, 24, "animated" in name)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_sizes_are_those_after_orientation(kind: str, orientation: int) -> None:
    """Otherwise, the layout would be that of the stored image (ggml-org/llama.cpp#20870, ollama/ollama#18418)."""
    header = read_header(saved(picture(), kind, orientation=orientation), "cat")
    size = (24, 40) if orientation >= 5 else (40, 24)
    assert header == ImageHeader(kind, *size, orientation=orientation)


@pytest.mark.parametrize("exif", [b"", b"Exif\0\0II*\0", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\xff\xff\x01\x12"])
def test_invalid_orientations_are_ignored(exif: bytes) -> None:
    data = png(1, 1, 8, 0, [b"\0"], [chunk(b"eXIf", exif)])
    assert read_header(data, "cat") == ImageHeader("PNG", 1, 1)


def test_rows_from_the_top_are_a_positive_height() -> None:
    data = bytearray(saved(picture(), "BMP"))
    struct.pack_into("<i", data, 22, -24)
    assert read_header(bytes(data), "cat") == ImageHeader("BMP", 40, 24)


def test_a_first_frame_beyond_the_canvas_enlarges_it() -> None:
    data = bytearray(saved_as("GIF"))
    struct.pack_into("<HH", data, 6, 8, 8)
    assert read_header(bytes(data), "cat") == ImageHeader("GIF", 40, 24)


def test_later_frames_beyond_the_canvas_do_not_count() -> None:
    frame = b"\x2c\0\0\0\0%c\0%c\0\0\x02\x02\x4c\x01\0"
    data = b"GIF89a\x03\0\x02\0\0\0\0" + frame % (3, 2) + frame % (9, 9) + b"\x3b"
    assert read_header(data, "cat") == ImageHeader("GIF", 3, 2, animated=True)


@pytest.mark.parametrize("name", REFUSED)
def test_other_formats_are_refused_by_name(name: str) -> None:
    data, known, program = REFUSED[name]
    error = refusal(data, "messages[2].content[1]")
    assert str(error) == f"messages[2].content[1]: {known} files are not supported"
    assert program in error.hint
    assert looks_like_image(data[:64]) == (known in ("HEIC", "AVIF", "TIFF"))


@pytest.mark.parametrize("data", [b"hello", b"BMW is a car", b"RIFF\x08\0\0\0WAVE", b"<html><svg>", bytes(100)])
def test_other_files_are_not_images(data: bytes) -> None:
    error = refusal(data)
    assert str(error) == "cat.png: not an image, or in an unknown format"
    assert error.hint == "images can be PNG, JPEG, WebP, GIF or BMP files"
    assert not looks_like_image(data)


def test_empty_files_are_refused() -> None:
    assert str(refusal(b"")) == "cat.png: the image file is empty"
    assert not looks_like_image(b"")


@pytest.mark.parametrize("name", SAVED)
def test_images_are_recognized_by_their_first_bytes(name: str) -> None:
    assert looks_like_image(saved_as(name)[:64])


@pytest.mark.parametrize("name", SAVED)
def test_every_truncated_file_is_refused_or_left_to_the_decoder(name: str) -> None:
    """JPEG and BMP files do not say where they end, so their decoders find the missing end."""
    data = saved_as(name)
    for size in range(len(data)):
        try:
            outcome: object = read_header(data[:size], "cat.png")
        except UsageError as error:
            outcome = str(error)
        if name.startswith(("JPEG", "BMP")) and outcome == read_header(data, "cat.png"):
            continue
        assert size <= 32 or outcome == "cat.png: the image file is truncated"


BOMBS = {
    "PNG": png(1 << 30, 1 << 30, 16, 6, []),
    "JPEG": b"\xff\xd8\xff\xc0\0\x0b\x08\xff\xff\xff\xff\x01\x01\x11\0\xff\xda\0\x08\x01\x01\0\0\x3f\0",
    "WebP": b"RIFF\x12\0\0\0WEBPVP8X\x0a\0\0\0" + bytes(4) + b"\xff" * 6,
    "GIF": b"GIF89a\xff\xff\xff\xff\0\0\0\x2c\0\0\0\0\xff\xff\xff\xff\0\x08\0\x3b",
    "GIF whose frame is large": b"GIF89a\x01\0\x01\0\0\0\0\x2c\0\0\0\0\xff\xff\xff\xff\0\x08\0\x3b",
    "BMP": b"BM" + struct.pack("<IIIIiiHH", 54, 0, 54, 40, 2**31 - 1, -(2**31), 1, 1) + bytes(24),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_from_their_headers(name: str) -> None:
    """Small files that would decode to gigabytes (vllm-project/vllm#47010, sgl-project/sglang#28588)."""
    error = refusal(BOMBS[name])
    assert str(error).startswith("cat.png: the image is too large: ")
    assert "pixels; the limits are 16,384 pixels per side and 67,108,864 in total" in str(error)


@pytest.mark.parametrize(
    ("width", "height", "fits"),
    [
        (LONGEST_SIDE, 1, True),
        (LONGEST_SIDE + 1, 1, False),
        (1, LONGEST_SIDE + 1, False),
        (8192, MOST_PIXELS // 8192, True),
        (8193, MOST_PIXELS // 8192, False),
    ],
)
def test_images_at_the_limits_are_accepted(width: int, height: int, fits: bool) -> None:
    data = png(width, height, 8, 0, [])
    if fits:
        assert read_header(data, "cat") == ImageHeader("PNG", width, height)
    else:
        assert "the image is too large" in str(refusal(data))


def test_large_files_are_refused() -> None:
    small, large = (png(1, 1, 8, 0, [b"\0"], [chunk(b"tEXt", bytes(MOST_BYTES - size))]) for size in (1000, 10))
    assert read_header(small, "cat").width == 1
    assert str(refusal(large)) == "cat.png: the image file is larger than 16 MiB"


@pytest.mark.push
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)) * 600_000, "chunks"),
        (b"\xff\xd8" + b"\xff\xe2\0\x02" * 4_000_000, "segments"),
        (b"\xff\xd8" + b"\xff" * 16_000_000, "segments"),
        (b"RIFF\0\0\xf0\0WEBP" + b"JUNK\0\0\0\0" * 2_000_000, "chunks"),
        (b"GIF89a\1\0\1\0\0\0\0" + b"!\xf9\0" * 5_000_000, "blocks"),
        (b"GIF89a\1\0\1\0\0\0\0" + b"!\xf9" + b"\1\1" * 8_000_000, "blocks"),
    ],
)
def test_files_of_millions_of_parts_are_refused(data: bytes, reason: str) -> None:
    """Reading them all would take seconds."""
    assert str(refusal(data)).endswith(f"file: too many {reason}")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (png(0, 5, 8, 0, []), "invalid PNG file: its size is 0 x 5 pixels"),
        (b"\x89PNG\r\n\x1a\n" + chunk(b"IDAT", bytes(20)), "invalid PNG file: it does not begin with an IHDR chunk"),
        (b"\xff\xd8\xff\xd9", "invalid JPEG file: it has no image data"),
        (b"\xff\xd8\xff\xda\0\x02", "invalid JPEG file: it has no frame header"),
        (b"RIFF\x04\0\0\0WEBP", "invalid WEBP file: it has no image data"),
        (b"GIF89a\1\0\1\0\0\0\0\x3b", "invalid GIF file: it has no image data"),
        (b"GIF89a\1\0\1\0\0\0\0\x99", "invalid GIF file: unknown block 0x99"),
    ],
)
def test_broken_files_get_a_reason(data: bytes, reason: str) -> None:
    assert str(refusal(data)) == f"cat.png: {reason}"


def test_only_the_decoding_process_imports_pillow() -> None:
    root = Path(__file__).resolve().parents[3] / "llmrun"
    imports = re.compile(r"^\s*(from|import) PIL\b", re.MULTILINE)
    paths = [path for path in root.rglob("*.py") if imports.search(path.read_text("utf-8"))]
    assert [path.relative_to(root).as_posix() for path in paths] == ["formats/images/worker.py"]
