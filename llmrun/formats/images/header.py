"""Reads the headers of image files: format, size, orientation, and whether the image is animated.

The limits are checked here, before anything is decoded, so a small file that would decode to gigabytes is refused
cheaply. Only the child process of decoding.py decodes images. This module imports neither Pillow nor NumPy, because
every request with an image reads the header first.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from struct import unpack_from
from typing import Final, NoReturn

from msgspec import Struct

from llmrun.base.errors import UsageError

MOST_IMAGES: Final = 32  # in one request
MOST_BYTES: Final = 16 << 20  # of one file
MOST_PIXELS: Final = 64 << 20  # slightly more than the 64 megapixels of some cameras
LONGEST_SIDE: Final = 16_384

_MOST_PARTS = 200_000  # segments, chunks or blocks of one file, which take 0.1 s to read; encoders write far fewer
_PNG = b"\x89PNG\r\n\x1a\n"
_SVG = (b"<svg", b"<!doctype svg")
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_HEIF = {  # brands of ISO media files
    b"avif": "AVIF",
    b"avis": "AVIF",
    b"heic": "HEIC",
    b"heix": "HEIC",
    b"heim": "HEIC",
    b"heis": "HEIC",
    b"hevc": "HEIC",
    b"hevx": "HEIC",
    b"mif1": "HEIC",
    b"msf1": "HEIC",
}
_TO_JPEG = "convert it to JPEG, for example with ImageMagick: magick IN.{suffix} OUT.jpg"
_TO_PNG = "convert it to PNG, for example with ImageMagick: magick IN.{suffix} OUT.png"
_CONVERSIONS = {
    "HEIC": _TO_JPEG,
    "AVIF": _TO_JPEG,
    "TIFF": _TO_PNG,
    "SVG": _TO_PNG,
    "PDF": "convert its pages to PNG, for example with Poppler: pdftoppm -png -r 100 IN.pdf OUT",
}


class ImageHeader(Struct, frozen=True):
    """The header of an image file.

    format         "PNG", "JPEG", "WEBP", "GIF" or "BMP"
    width, height  the size of the image as shown, after its orientation was applied
    animated       True if the file has more than one frame, of which the model sees the first
    orientation    the orientation in EXIF's numbers, 1 to 8; 1 if the stored image is shown unchanged
    """

    format: str
    width: int
    height: int
    animated: bool = False
    orientation: int = 1


def looks_like_image(data: bytes) -> bool:
    """Return True if a file with these first bytes (64 suffice) is an image.

    Images in HEIC, AVIF and TIFF count, although `read_header` refuses them with a hint. SVG and PDF files are
    documents.
    """
    return bool(_accepted_format(data)) or _refused_format(data) in ("HEIC", "AVIF", "TIFF")


def read_header(data: bytes, place: str) -> ImageHeader:
    """Read the header of an image file and check the limits.

    data   the whole file, or more than MOST_BYTES of it
    place  where the image is from, for error messages: "cat.jpg" or "messages[2].content[1]"
    Raises UsageError if the file is not an accepted image, is truncated, or exceeds a limit.
    """
    if len(data) > MOST_BYTES:
        raise UsageError(
            f"{place}: the image file is larger than {MOST_BYTES >> 20} MiB",
            hint="make the image smaller, or save it as JPEG",
        )
    name = _accepted_format(data)
    if not name:
        _refuse(data, place)
    try:
        header = _READERS[name](data)
    except (struct.error, IndexError):
        raise truncated(place) from None
    except _Broken as error:
        raise broken(place, name, str(error)) from None
    if header.width > LONGEST_SIDE or header.height > LONGEST_SIDE or header.width * header.height > MOST_PIXELS:
        raise UsageError(
            f"{place}: the image is too large: {header.width:,} x {header.height:,} pixels; the limits are "
            f"{LONGEST_SIDE:,} pixels per side and {MOST_PIXELS:,} in total",
            hint="make the image smaller",
        )
    return header


def truncated(place: str) -> UsageError:
    """Return the error for a file whose end is missing."""
    return UsageError(f"{place}: the image file is truncated", hint="download or save the image again")


def broken(place: str, name: str, reason: str) -> UsageError:
    """Return the error for a file that breaks its format's rules. `name` is the format."""
    return UsageError(f"{place}: invalid {name} file: {reason}", hint="open the image in a viewer and save it again")


class _Broken(Exception):
    """Raised for a file that breaks the rules of its format. The message is the reason."""


# --- formats ----------------------------------------------------------------------------------------------------------


def _accepted_format(data: bytes) -> str:
    """Return the format of a file, or "" if llmrun does not read its format. The file's suffix does not matter."""
    if data.startswith(_PNG):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    # "BM" may also begin a text; in a BMP file, four zeros follow the file's size
    if data.startswith(b"BM") and data[6:10] == bytes(4):
        return "BMP"
    return ""


def _refused_format(data: bytes) -> str:
    """Return the name of a known format that llmrun does not read, or ""."""
    if data[4:8] == b"ftyp":
        brands = (data[8:12], *(data[at : at + 4] for at in range(16, min(64, len(data)), 4)))
        names = [_HEIF[brand] for brand in brands if brand in _HEIF]
        return "AVIF" if "AVIF" in names else names[0] if names else ""
    if data.startswith(_TIFF):
        return "TIFF"
    start = data[:1024].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if start.startswith(b"%pdf-"):
        return "PDF"
    if start.startswith(_SVG) or (start.startswith((b"<?xml", b"<!--")) and any(mark in start for mark in _SVG)):
        return "SVG"
    return ""


def _refuse(data: bytes, place: str) -> NoReturn:
    if not data:
        raise UsageError(f"{place}: the image file is empty")
    if name := _refused_format(data):
        raise UsageError(
            f"{place}: {name} files are not supported", hint=_CONVERSIONS[name].format(suffix=name.lower())
        )
    raise UsageError(
        f"{place}: not an image, or in an unknown format", hint="images can be PNG, JPEG, WebP, GIF or BMP files"
    )


def _read_png(data: bytes) -> ImageHeader:
    if data[12:16] != b"IHDR":
        raise _Broken("it does not begin with an IHDR chunk")
    width, height = _size(*unpack_from(">II", data, 16))
    animated, orientation = False, 1
    at = len(_PNG)
    for _ in range(_MOST_PARTS):
        length, kind = unpack_from(">I4s", data, at)
        if kind == b"acTL":
            animated = unpack_from(">I", data, at + 8)[0] > 1
        elif kind == b"eXIf":
            orientation = _orientation(data[at + 8 : at + 8 + length])
        at += 12 + length
        data[at - 1]  # raises IndexError if the chunk is cut off
        if kind == b"IEND":
            return _shown("PNG", width, height, orientation, animated)
    raise _Broken("too many chunks")


def _read_jpeg(data: bytes) -> ImageHeader:
    size, orientation = None, 0
    for marker, at, length in jpeg_segments(data):
        if marker == 0xE1 and not orientation and data[at : at + 6] == b"Exif\0\0":
            orientation = _orientation(data[at : at + length])
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # the frame headers, SOF0 to SOF15
            if size is not None:
                raise _Broken("it has two frame headers")
            height, width = unpack_from(">HH", data, at + 1)
            size = _size(width, height)
    if size is None:
        raise _Broken("it has no frame header")
    return _shown("JPEG", *size, orientation or 1)


def jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the marker of each segment before the first scan, and the offset and the length of its contents."""
    at = 2
    for _ in range(_MOST_PARTS):
        at = data.find(b"\xff", at)  # tolerates bytes between segments, as libjpeg does
        if at < 0:
            raise IndexError
        marker = data[at + 1]
        at += 1
        if marker in (0x00, 0x01, 0xFF) or 0xD0 <= marker <= 0xD7:
            continue  # fill bytes, and markers without contents
        if marker == 0xD9:
            raise _Broken("it has no image data")
        at += 1
        (length,) = unpack_from(">H", data, at)
        if length < 2:
            raise _Broken("a segment has no length")
        if marker == 0xDA:  # SOS, the start of a scan
            return
        yield marker, at + 2, length - 2
        at += length
    raise _Broken("too many segments")


def _read_webp(data: bytes) -> ImageHeader:
    size, orientation, frames = None, 1, 0
    end = 8 + unpack_from("<I", data, 4)[0]
    data[end - 1]  # raises IndexError if the file is cut off
    at = 12
    for _ in range(_MOST_PARTS):
        if at + 8 > end:
            break
        kind, length = unpack_from("<4sI", data, at)
        at += 8
        if kind == b"VP8X" and size is None:
            width, height = unpack_from("<I", data, at + 3)[0] >> 8, unpack_from("<I", data, at + 6)[0] >> 8
            size = _size(width + 1, height + 1)  # each is stored in three bytes, minus 1
        elif kind == b"VP8 " and size is None:
            if data[at + 3 : at + 6] != b"\x9d\x01\x2a":
                raise _Broken("its frame has no start code")
            width, height = unpack_from("<HH", data, at + 6)
            size = _size(width & 0x3FFF, height & 0x3FFF)
        elif kind == b"VP8L" and size is None:
            (bits,) = unpack_from("<I", data, at + 1)
            size = _size((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
        elif kind == b"EXIF":
            orientation = _orientation(data[at : at + length])
        elif kind == b"ANMF":
            frames += 1
        at += length + length % 2
    else:
        raise _Broken("too many chunks")
    if size is None:
        raise _Broken("it has no image data")
    return _shown("WEBP", *size, orientation, frames > 1)


def _read_gif(data: bytes) -> ImageHeader:
    width, height, flags = unpack_from("<HHB", data, 6)
    frames, at, is_in_block = 0, 13 + _color_table(flags), False
    for _ in range(_MOST_PARTS):
        block = data[at]
        if is_in_block:  # a part of a block begins with its length, which is 0 at the end of the block
            at += 1 + block
            is_in_block = block > 0
            continue
        if block == 0x3B:  # the trailer
            break
        if block == 0x2C:  # an image descriptor
            frames += 1
            left, top, wide, high, flags = unpack_from("<HHHHB", data, at + 1)
            if frames == 1:  # as in Pillow, a frame that exceeds the canvas enlarges the canvas
                width, height = max(width, left + wide), max(height, top + high)
            at += 11 + _color_table(flags)
        elif block == 0x21:  # an extension
            at += 2
        else:
            raise _Broken(f"unknown block 0x{block:02x}")
        is_in_block = True
    else:
        raise _Broken("too many blocks")
    if not frames:
        raise _Broken("it has no image data")
    return _shown("GIF", *_size(width, height), 1, frames > 1)


def _color_table(flags: int) -> int:
    """Return the bytes of the color table that these flags announce."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _read_bmp(data: bytes) -> ImageHeader:
    (length,) = unpack_from("<I", data, 14)
    if length == 12:
        width, height = unpack_from("<HH", data, 18)
    else:
        width, height = unpack_from("<ii", data, 18)
    return _shown("BMP", *_size(width, abs(height)), 1)  # the rows of images with a negative height begin at the top


_READERS = {"PNG": _read_png, "JPEG": _read_jpeg, "WEBP": _read_webp, "GIF": _read_gif, "BMP": _read_bmp}


# --- sizes and orientations -------------------------------------------------------------------------------------------


def _size(width: int, height: int) -> tuple[int, int]:
    if width < 1 or height < 1:
        raise _Broken(f"its size is {width} x {height} pixels")
    return width, height


def _shown(name: str, width: int, height: int, orientation: int, animated: bool = False) -> ImageHeader:
    if orientation >= 5:  # rotated by 90 degrees
        width, height = height, width
    return ImageHeader(name, width, height, animated, orientation)


def _orientation(exif: bytes) -> int:
    """Return the orientation in EXIF data, or 1 if the data has none or is invalid, as viewers do."""
    exif = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:
        (at,) = unpack_from(f"{order}I", exif, 4)
        (entries,) = unpack_from(f"{order}H", exif, at)
        for entry in range(at + 2, at + 2 + 12 * entries, 12):
            tag, kind, count, value = unpack_from(f"{order}HHIH", exif, entry)
            if tag == 0x0112:
                return value if kind == 3 and count == 1 and 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1
