"""Reads mutated images, as the server and the engine do: first the header, then the decoding process."""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import psutil
from PIL import Image

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.formats.images.decoding import ImageDecoder
from llmrun.formats.images.header import looks_like_image, read_header
from llmrun.formats.images.scaling import Box, Filter, Scaled
from tests.soak.driver import Broken, Case, Soak
from tests.support.images.files import SAVED, chunk, picture, png, saved, saved_as

PLACE = "messages[0].content[1]"
_LONGEST = 400  # characters of an error
_NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x100, 0x3FFF, 0x4000, 0x4001, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF)

Files = dict[str, list[bytes]]


def images(soak: Soak) -> Iterator[Case]:
    """Read one mutated image per case. The ten formats, of which five are refused, take turns.

    A case ends in tiles of the right shapes or in one printable line that names the place. Other errors, invalid
    answers of the decoding process, and more memory than its limit are findings.
    """
    decoder, files = ImageDecoder(), bases()
    names = list(files)

    def case(number: int) -> str:
        random = soak.random(number)
        name = names[number % len(names)]
        data = random.choice(files[name])
        if number >= len(names):  # the first cases are valid files
            data = mutated(random, name, data)
        outcome = read(decoder, data, random)
        return f"{name} {outcome}" if number < len(names) else outcome

    try:
        yield case
    finally:
        decoder.close()


def read(decoder: ImageDecoder, data: bytes, random: Random) -> str:
    """Read an image and return the outcome."""
    width, height = random.choice(((32, 32), (1, 1), (448, 14), (3, 200)))
    scaled = [Scaled(width, height, random.choice(list(Filter)), (Box(0, 0, width, height),))]
    looks_like_image(data[:64])
    try:
        header = read_header(data, PLACE)
        tiles = decoder.tiles(data, scaled, PLACE).tiles
    except UsageError as error:
        check_words(error)
        return _general(str(error))
    finally:
        check_memory(decoder)
    if [tile.shape for tile in tiles] != [(height, width, 3)] or not header.width:
        raise Broken(f"tiles of another shape: {[tile.shape for tile in tiles]}")
    return "decoded"


def check_words(error: LlmrunError) -> None:
    line = str(error)
    if not line.startswith(f"{PLACE}: ") or not line.isprintable() or len(line) > _LONGEST:
        raise Broken(f"not one clear line: {line!r}")
    if "invalid answer" in line or "its process ended" in line:
        raise Broken(line)


def check_memory(decoder: ImageDecoder) -> None:
    if decoder._child is None or decoder._memory == 0:
        return
    status = Path(f"/proc/{decoder._child.pid}/status")
    if status.exists():
        most = int(re.findall(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)[0]) << 10
    else:
        most = psutil.Process(decoder._child.pid).memory_info().rss
    if most > decoder._memory:
        raise Broken(f"the process used {most:,} bytes of memory; its limit was {decoder._memory:,}")


def _general(line: str) -> str:
    """Return an error without its numbers and names, so that equal outcomes are counted together."""
    line = line.removeprefix(f"{PLACE}: ")
    return re.sub(r"file: .*", "file", re.sub(r"(is too large|cannot be decoded): .*", r"\1", line))


# --- files ------------------------------------------------------------------------------------------------------------


def bases() -> Files:
    """Return valid files of each format."""
    small = picture(19, 13)
    files: Files = {"PNG": [], "JPEG": [], "WEBP": [], "GIF": [], "BMP": []}
    for name, (kind, _, _) in SAVED.items():
        files[kind] += saved_as(name), saved_as(name, small)
    for kind in ("PNG", "JPEG", "WEBP"):
        files[kind].append(saved(small, kind, orientation=6))
    row = struct.pack(">8H", *range(0, 65_536, 8_192))
    key = chunk(b"tRNS", bytes(2))
    files["PNG"] += [png(8 // (1, 0, 3, 0, 2, 0, 4)[color], 4, 16, color, [row] * 4) for color in (0, 4, 6)]
    files["PNG"] += [png(8, 4, depth, 0, [b"\x1b" * depth] * 4, [key]) for depth in (1, 2, 4, 8)]
    files |= {
        "HEIC": [b"\0\0\0\x1cftypheic\0\0\0\0mif1heicmiaf" + bytes(range(200))],
        "AVIF": [b"\0\0\0\x1cftypavif\0\0\0\0mif1avifmiaf" + bytes(range(200))],
        "SVG": [b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'],
        "TIFF": [_saved_plainly(small, "TIFF")],
        "PDF": [_saved_plainly(small, "PDF")],
    }
    return files


def _saved_plainly(image: Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


# --- mutations --------------------------------------------------------------------------------------------------------


def mutated(random: Random, name: str, data: bytes) -> bytes:
    """Return a file with one to four mutations, most of them near its beginning."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        if changed:
            random.choice(_MUTATIONS)(random, changed)
    if name == "PNG" and random.random() < 0.9:
        _fix_checksums(changed)
    if name == "WEBP" and len(changed) >= 8 and random.random() < 0.5:
        struct.pack_into("<I", changed, 4, len(changed) - 8)
    return bytes(changed)


def _at(random: Random, data: bytearray) -> int:
    return random.randrange(min(len(data), random.choice((64, 1 << 20))))


def _flip(random: Random, data: bytearray) -> None:
    data[_at(random, data)] ^= 1 << random.randrange(8)


def _set_number(random: Random, data: bytearray) -> None:
    """Overwrite a number of 8, 16 or 32 bits in either byte order."""
    size = random.choice((1, 2, 4))
    value = random.choice(_NUMBERS) & ((1 << 8 * size) - 1)
    at = _at(random, data)
    data[at : at + size] = value.to_bytes(size, random.choice(("little", "big")))


def _cut(random: Random, data: bytearray) -> None:
    del data[random.randrange(len(data)) :]


def _remove(random: Random, data: bytearray) -> None:
    at = _at(random, data)
    del data[at : at + random.choice((1, 2, 4, 30))]


def _repeat(random: Random, data: bytearray) -> None:
    at, size = _at(random, data), random.choice((1, 12, 100, 1_000))
    data[at:at] = data[at : at + size] * random.choice((1, 2, 50))


def _insert(random: Random, data: bytearray) -> None:
    at = _at(random, data)
    data[at:at] = random.randbytes(random.choice((1, 2, 4, 300)))


def _swap(random: Random, data: bytearray) -> None:
    """Exchange two parts of the file."""
    first, second = sorted((_at(random, data), _at(random, data)))
    size = random.choice((4, 12, 40))
    data[first : second + size] = (
        data[second : second + size] + data[first + size : second] + data[first : first + size]
    )


def _transplant(random: Random, data: bytearray) -> None:
    """Append or insert the beginning of another format."""
    other = saved_as(random.choice(list(SAVED)), picture(5, 4))
    at = random.choice((0, _at(random, data), len(data)))
    data[at:at] = other[: random.choice((8, 40, len(other)))]


_MUTATIONS: tuple[Callable[[Random, bytearray], None], ...] = (
    *(_flip, _flip, _set_number, _set_number, _cut, _remove, _repeat, _insert, _swap, _transplant),
)


def _fix_checksums(data: bytearray) -> None:
    """Correct the checksums of a PNG file's chunks, because Pillow looks at little else if they are wrong."""
    at = 8
    while at + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, at)
        end = at + 8 + length
        if end + 4 > len(data):
            return
        struct.pack_into(">I", data, end, zlib.crc32(data[at + 4 : end]))
        at = end + 4
