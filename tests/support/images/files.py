"""Image files for tests: an asymmetric picture in every format, and PNG files with any header."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Picture = NDArray[np.uint8]

ORIENTATION = 0x0112  # the EXIF tag
LOSSLESS: dict[str, dict[str, Any]] = {"PNG": {}, "WEBP": {"lossless": True}, "BMP": {}}
SAVED: dict[str, tuple[str, str, dict[str, Any]]] = {  # name: format, mode, and options of `saved`
    "PNG": ("PNG", "RGB", {}),
    "PNG with a palette": ("PNG", "P", {}),
    "PNG animated": ("PNG", "RGB", {"frames": 3}),
    "JPEG": ("JPEG", "RGB", {}),
    "JPEG progressive": ("JPEG", "RGB", {"progressive": True}),
    "JPEG CMYK": ("JPEG", "CMYK", {}),
    "WebP": ("WEBP", "RGB", {}),
    "WebP lossless": ("WEBP", "RGB", {"lossless": True}),
    "WebP with alpha": ("WEBP", "RGBA", {}),
    "WebP animated": ("WEBP", "RGB", {"frames": 3}),
    "GIF": ("GIF", "P", {}),
    "GIF animated": ("GIF", "RGB", {"frames": 3}),
    "BMP": ("BMP", "RGB", {}),
    "BMP with a palette": ("BMP", "P", {}),
}


def picture(width: int = 40, height: int = 24) -> Image.Image:
    """Return a picture that no rotation or reflection leaves unchanged: gradients, a letter and a corner."""
    columns, rows = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    pixels = np.stack([columns, rows, np.full_like(columns, 64)], axis=-1).astype(np.uint8)
    pixels[: height // 4, : width // 4] = (0, 0, 255)
    image = Image.fromarray(pixels)
    ImageDraw.Draw(image).text((width // 3, height // 4), "F", fill="white")
    return image


def saved(
    image: Image.Image, name: str, mode: str = "", *, frames: int = 1, orientation: int = 0, **options: Any
) -> bytes:
    """Return an image file. Later frames of an animation have other pixels."""
    if mode:
        image = image.convert(mode)
    if frames > 1:
        others = [Image.new(image.mode, image.size, (90 * number, 9, 9)) for number in range(1, frames)]
        options |= {"save_all": True, "append_images": others}
    if orientation:
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        options |= {"exif": exif}
    file = io.BytesIO()
    image.save(file, name, **options)
    return file.getvalue()


def saved_as(name: str, image: Image.Image | None = None) -> bytes:
    """Return a file as named in SAVED."""
    kind, mode, options = SAVED[name]
    return saved(image or picture(), kind, mode, **options)


def chunk(kind: bytes, body: bytes) -> bytes:
    """Return a chunk of a PNG file."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, depth: int, color: int, rows: Iterable[bytes], extra: Sequence[bytes] = ()) -> bytes:
    """Return a PNG file. `rows` holds the unfiltered rows, and `extra` the chunks before the pixels."""
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows), 1)
    return b"".join((b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", header), *extra, chunk(b"IDAT", pixels), chunk(b"IEND", b"")))
