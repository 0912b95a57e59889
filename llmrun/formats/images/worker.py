"""The process that decodes and resizes images, the only one that imports Pillow.

A request is the header that the parent has read, the sizes that the model sees, and the bytes of the file. An answer is
[kind, value]:

"decoded"    the digest of the picture, and the pixels of each tile
"truncated"  None; the end of the file is missing
"broken"     the reason for which the file cannot be decoded

Pictures become RGB without alpha: transparent pixels are shown on white, 16-bit samples are divided by 257, and color
profiles are ignored.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from llmrun.base.processes.worker import serve_limited

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a thread's buffers and stack would count towards the memory limit

import numpy as np
from numpy.typing import NDArray
from PIL import BmpImagePlugin, GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin
from PIL.ImageFile import ImageFile

from llmrun.formats.images.header import ImageHeader, jpeg_segments
from llmrun.formats.images.resampling import Picture, tiles
from llmrun.formats.images.scaling import Scaled

_BAND_PIXELS = 1 << 20  # pixels that are converted at a time, so that few copies of a picture exist at once
_GREY, _COLOR, _GREY_ALPHA, _COLOR_ALPHA = 0, 2, 4, 6  # color types of PNG
_PIXEL_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_JPEG_METADATA = (*range(0xE1, 0xEE), 0xEF, 0xFE)  # EXIF data, profiles and comments; libjpeg needs APP0 and APP14
_PLUGINS: dict[str, Callable[[io.BytesIO], ImageFile]] = {
    "JPEG": JpegImagePlugin.JpegImageFile,
    "WEBP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
}


def main() -> None:
    """Answer requests until stdin closes."""
    decode = msgspec.msgpack.Decoder(tuple[ImageHeader, list[Scaled], bytes]).decode
    serve_limited(_answer, decode, msgspec.msgpack.encode)


def _answer(request: tuple[ImageHeader, list[Scaled], bytes]) -> tuple[str, Any]:
    header, scaled, data = request
    try:
        picture = decoded(data, header)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - Pillow raises almost any exception for broken files
        reason = str(error) or type(error).__name__
        is_truncated = isinstance(error, EOFError) or "truncated" in reason.lower()
        return ("truncated", None) if is_truncated else ("broken", reason)
    digest = hashlib.sha256(struct.pack("<II", *picture.shape[:2]))
    digest.update(picture.data)
    return "decoded", (digest.digest(), [tile.tobytes() for tile in tiles(picture, scaled)])


def decoded(data: bytes, header: ImageHeader) -> Picture:
    """Return the picture as shown, which is the first frame of an animation."""
    file = _opened(data, header.format)
    width, height = file.images[0].size
    if (width, height) != ((header.height, header.width) if header.orientation >= 5 else (header.width, header.height)):
        raise ValueError(f"it has {width} x {height} pixels, unlike its header")
    picture = np.empty((height, width, 3), np.uint8)
    step = max(1, _BAND_PIXELS // width)
    for top in range(0, height, step):
        bottom = min(top + step, height)
        _flatten(_samples(file, (0, top, width, bottom)), file.transparent, picture[top:bottom])
    return np.ascontiguousarray(_oriented(picture, header.orientation))


class _File(NamedTuple):
    """An open file.

    images       the image; or two, which hold the high and the low bytes of the samples
    in_pairs     True if each two channels are the high and the low bytes of one
    transparent  the samples of the only transparent color, or None
    """

    images: Sequence[ImageFile]
    in_pairs: bool = False
    transparent: NDArray[np.integer[Any]] | None = None


def _opened(data: bytes, name: str) -> _File:
    if name == "PNG":
        return _opened_png(data)
    return _File([_PLUGINS[name](io.BytesIO(_without_metadata(data) if name == "JPEG" else data))])


def _without_metadata(data: bytes) -> bytes:
    """Return a JPEG file without the metadata before its first scan, because Pillow would parse it."""
    kept, at = [], 0
    for marker, begin, length in jpeg_segments(data):
        if marker in _JPEG_METADATA:
            kept.append(data[at : begin - 4])
            at = begin + length
    return b"".join([*kept, data[at:]])


def _opened_png(data: bytes) -> _File:
    """Open a PNG file.

    Pillow gets only the chunks with pixels, because it refuses files with long texts and profiles, and because it
    compares the transparent color of some types with scaled samples. For samples of 16 bits, Pillow returns only the
    high bytes. It therefore reads samples of grey as two channels of 8 bits, and files with colors a second time.
    """
    depth, color = data[24], data[25]
    in_pairs = depth == 16 and color in (_GREY, _GREY_ALPHA)
    transparent, kept, at = None, [data[:8]], 8
    kind = b""
    while kind != b"IEND":
        length, kind = struct.unpack_from(">I4s", data, at)
        body, checksum = data[at + 8 : at + 8 + length], data[at + 8 + length : at + 12 + length]
        at += 12 + length
        if kind not in _PIXEL_CHUNKS:
            continue
        if struct.pack(">I", zlib.crc32(kind + body)) != checksum:  # Pillow does not check all of them
            raise ValueError(f"the checksum of its {kind.decode()} chunk is wrong")
        if kind == b"tRNS" and color in (_GREY, _COLOR):
            transparent = np.frombuffer(body, ">u2") * {1: 255, 2: 85, 4: 17}.get(depth, 1)
            continue
        if kind == b"IHDR" and in_pairs:
            body = body[:8] + bytes((8, _GREY_ALPHA if color == _GREY else _COLOR_ALPHA)) + body[10:]
        kept += struct.pack(">I4s", length, kind), body, struct.pack(">I", zlib.crc32(kind + body))
    images = [PngImagePlugin.PngImageFile(io.BytesIO(b"".join(kept)))]
    if depth == 16 and not in_pairs:
        images.append(PngImagePlugin.PngImageFile(io.BytesIO(b"".join(kept))))
        low = "RGB;16L" if color == _COLOR else "RGBA;16L"  # reads the other byte of each sample
        images[1].tile = [tile._replace(args=low) for tile in images[1].tile]
    return _File(images, in_pairs, transparent)


def _samples(file: _File, box: tuple[int, int, int, int]) -> NDArray[np.integer[Any]]:
    """Return the samples of a part of the image, uint8 or uint16[rows, columns, 1 to 4 channels]."""
    parts = [image.crop(box) for image in file.images]
    if len(parts) == 1 and not file.in_pairs:
        mode = "RGBA" if parts[0].has_transparency_data else {"1": "L", "L": "L"}.get(parts[0].mode, "RGB")
        parts = [parts[0].convert(mode)]
    arrays: list[NDArray[np.uint8]] = [np.asarray(part).reshape(box[3] - box[1], box[2], -1) for part in parts]
    if len(arrays) == 2:
        return arrays[0].astype(np.uint16) << 8 | arrays[1]
    return arrays[0].view(">u2") if file.in_pairs else arrays[0]


def _flatten(samples: NDArray[np.integer[Any]], transparent: NDArray[np.integer[Any]] | None, result: Picture) -> None:
    """Write the colors of the samples, shown on white, to `result`."""
    hidden = None if transparent is None else (samples == transparent).all(axis=-1)
    if samples.dtype != np.uint8:
        samples = (samples.astype(np.uint32) + 128) // 257
    channels = samples.shape[-1]
    alpha = samples[..., -1].astype(np.uint16) if channels in (2, 4) else None
    for channel in range(3):  # one at a time, because NumPy is slow if the last axis has only three elements
        color = samples[..., channel if channels >= 3 else 0]
        result[..., channel] = color if alpha is None else (color * alpha + 255 * (255 - alpha) + 127) // 255
    if hidden is not None:
        result[hidden] = 255


def _oriented(picture: Picture, orientation: int) -> Picture:
    """Return a view of a stored picture in the orientation in which it is shown. The numbers are those of EXIF."""
    if orientation >= 5:
        picture = picture.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        picture = picture[::-1]
    if orientation in (2, 3, 6, 7):
        picture = picture[:, ::-1]
    return picture
