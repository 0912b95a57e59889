"""Small image files for requests."""

from __future__ import annotations

import base64
import hashlib
import struct
import zlib


def png(width: int = 4, height: int = 3, color: bytes = b"\xd0\x20\x20") -> bytes:
    """Return a PNG file with one color."""
    rows = b"".join(b"\0" + color * width for _ in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (_chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(rows)), _chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def bomb(width: int = 60_000, height: int = 60_000) -> bytes:
    """Return a small PNG file that claims to have many pixels."""
    found = png(1, 1)
    return found[:16] + struct.pack(">II", width, height) + found[24:]


def base64_of(file: bytes) -> str:
    return base64.b64encode(file).decode("ascii")


def data_url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64_of(file)}"


def key_of(file: bytes) -> str:
    """Return the key of a file in ChatPrompt.images."""
    return hashlib.sha256(file).hexdigest()


def part_of(file: bytes, **more: str) -> dict[str, str]:
    """Return the part of a message in a ChatPrompt that stands for an image."""
    return {"type": "image", "image": key_of(file), **more}


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


PHOTO = png(64, 96, b"\xff\x00\x00")
# What the scripted model says about it: there is a row for each patch of 32 x 32 pixels.
SEEN = "You said: [6 rows of #ff0000]Which color?"
RED, BLUE = png(), png(5, 2, b"\x20\x20\xd0")
