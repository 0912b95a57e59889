"""Small pictures, and engines with a scripted model that reads them without a process for decoding."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmrun.backends.scripted import ScriptedBackend, Voice, echo
from llmrun.backends.scripted_vision import ScriptedVision
from llmrun.engine.engine import Engine
from llmrun.engine.requests import ChatPrompt, Request
from llmrun.formats.images.decoding import Decoded
from llmrun.formats.images.scaling import Scaled
from tests.support.templates.template_runs import PROCESS

Pixels = NDArray[np.uint8]
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def plain(width: int, height: int, color: tuple[int, int, int] = RED) -> Pixels:
    """Return a picture of one color."""
    return np.full((height, width, 3), color, np.uint8)


def png(pixels: Pixels, level: int = -1) -> bytes:
    """Return a PNG file whose pixels are compressed with this level of zlib."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, _ = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, level)) + chunk(b"IEND", b"")
    )


class PlainDecoder:
    """Decodes the files of `png` in this process, with the nearest pixels. `names` lists what was decoded."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def tiles(self, data: bytes, scaled: Sequence[Scaled], place: str) -> Decoded:
        self.names.append(place)
        width, height = struct.unpack(">II", data[16:24])
        at = data.index(b"IDAT")
        rows = zlib.decompress(data[at + 4 : at + 4 + int.from_bytes(data[at - 4 : at])])
        pixels = np.frombuffer(rows, np.uint8).reshape(height, 1 + 3 * width)[:, 1:].reshape(height, width, 3)
        tiles = []
        for one in scaled:
            y, x = np.arange(one.height) * height // one.height, np.arange(one.width) * width // one.width
            large = pixels[y][:, x]
            tiles += [large[box.top : box.bottom, box.left : box.right] for box in one.boxes]
        return Decoded(tiles, hashlib.sha256(pixels.tobytes()).digest())

    def kill(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class AtOnce(Executor):
    """Runs functions in `submit`, so that steps are the same on a busy machine."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - `result` raises it
            done.set_exception(error)
        return done


class Sight:
    """An engine with a scripted model that reads images. The engine is never closed, because it shares a process.

    projector  the fields of ScriptedProjector
    """

    def __init__(
        self, tmp_path: Path, projector: dict[str, Any] | None = None, *, voice: Voice | None = echo, **options: Any
    ) -> None:
        script = tmp_path / "mmproj.json"
        script.write_text(json.dumps(projector or {}))
        engine_options = {
            key: options.pop(key)
            for key in ("drafts", "rows_per_step", "max_running", "overcommit", "share_prefixes")
            if key in options
        }
        self.backend = ScriptedBackend(voice, projector=script, **{"context_size": 4096, **options})
        self.engine = Engine(self.backend, templates=PROCESS, **engine_options)
        self.decoder = PlainDecoder()
        assert self.engine.image_encoder is not None
        vars(self.engine.image_encoder)["_decoder"] = self.decoder
        vars(self.engine.image_encoder)["_threads"] = AtOnce()

    def use_vision(self, vision: ScriptedVision) -> None:
        """Replace the encoder of the engine."""
        assert self.engine.image_encoder is not None
        self.backend.vision = self.engine.image_encoder._vision = vision

    @property
    def encoded(self) -> int:
        """How many images were encoded so far."""
        assert self.backend.vision is not None
        return len(self.backend.vision.encoded)


def part(data: bytes, detail: str = "auto") -> dict[str, str]:
    """Return a part of a message with an image."""
    return {"type": "image", "image": hashlib.sha256(data).hexdigest(), "detail": detail}


# A text, a file, or a file with its detail
Piece = str | bytes | tuple[bytes, str]


def chat(*contents: str | Sequence[Piece], **fields: Any) -> ChatPrompt:
    """Return a conversation: texts, or lists of texts and files, in which users and the model take turns."""
    messages: list[dict[str, Any]] = []
    images: dict[str, bytes] = {}
    for number, content in enumerate(contents):
        parts: Any = content
        if not isinstance(content, str):
            parts = []
            for piece in content:
                if isinstance(piece, str):
                    parts.append({"type": "text", "text": piece})
                    continue
                data, detail = (piece, "auto") if isinstance(piece, bytes) else piece
                parts.append(part(data, detail))
                images[parts[-1]["image"]] = data
        messages.append({"role": "user" if number % 2 == 0 else "assistant", "content": parts})
    return ChatPrompt(messages, images=images, **fields)


def ask(*contents: str | Sequence[Piece], **fields: Any) -> Request:
    """Return a request whose prompt is as in `chat`."""
    return Request(chat(*contents), **{"max_tokens": 80, **fields})
