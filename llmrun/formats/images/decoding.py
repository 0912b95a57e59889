"""Decodes images in a child process (worker.py), whose time and memory are limited."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod

import numpy as np
from msgspec import Struct, convert, msgpack
from numpy.typing import NDArray

from llmrun.base.errors import LlmrunError, UsageError, shown
from llmrun.base.processes.limits import INVALID_ANSWER, IsolatedProcess, ProcessFailed, ProcessLimits
from llmrun.formats.images.header import ImageHeader, broken, read_header, truncated
from llmrun.formats.images.scaling import Box, Scaled

_CPU_S, _CPU_S_PER_PIXEL = 5.0, 0.5e-6  # ten times the time that decoding takes on a slow machine
_WALL_PER_CPU_S = 6  # wall-clock seconds allowed per second of CPU time, for busy machines
_MEMORY = 400_000_000  # for Python, NumPy and the file, but not for the pictures
_MEMORY_PER_PIXEL = {"PNG": 14, "JPEG": 16, "WEBP": 24, "GIF": 10, "BMP": 10}  # libwebp keeps four copies
_USUAL_PIXELS = 16 << 20  # with lower limits for smaller images, the process would only start again more often
_OUTPUT = 1 << 16  # bytes of an answer, besides the tiles


@functools.cache
def decoder_version() -> str:
    """Return the version of everything that turns a file into pixels, without importing Pillow."""
    from llmrun.base.machine.system import installed_version
    from llmrun.formats.images.resampling import VERSION

    return f"Pillow {installed_version('pillow')}, resampling {VERSION}"


class Decoded(Struct, frozen=True):
    """A decoded image.

    tiles   uint8[height, width, 3] for each box of each `Scaled`, read-only
    pixels  the SHA-256 of the whole picture and its size, which is the same for all files with the same pixels
    """

    tiles: list[NDArray[np.uint8]]
    pixels: bytes


class ImageDecoder(IsolatedProcess):
    """The process that decodes images, started by `start` or on first use, which takes 0.2 s. Thread-safe."""

    def __init__(self) -> None:
        super().__init__("formats.images.worker", "images", msgpack.decode)

    def tiles(self, data: bytes, scaled: Sequence[Scaled], place: str) -> Decoded:
        """Decode and resize an image.

        data    the whole file
        place   where the image is from, as in `read_header`
        Raises UsageError if the file cannot be decoded, and LlmrunError if the process fails for another reason.
        """
        header = read_header(data, place)
        shapes = [_shape(box) for one in scaled for box in one.boxes]
        request = msgpack.encode((header, scaled, data))
        try:
            kind, value = self.request(request, self._limits(header, scaled), ("decoded", "truncated", "broken"))
        except ProcessFailed as failure:
            if failure.status is not None and failure.status >= 0:  # an exception in our own code, or no Pillow
                raise LlmrunError(f"{place}: cannot decode the image: {failure}") from None
            raise UsageError(f"{place}: the image cannot be decoded: {failure}") from None
        if kind == "truncated":
            raise truncated(place)
        if kind == "broken":
            raise broken(place, header.format, shown(str(value), 200))
        try:
            pixels, tiles = convert(value, tuple[bytes, list[bytes]])
            arrays = [np.frombuffer(tile, np.uint8).reshape(shape) for tile, shape in zip(tiles, shapes, strict=True)]
        except ValueError:  # a file may have taken over the process
            self.close()
            raise UsageError(f"{place}: the image cannot be decoded: {INVALID_ANSWER}") from None
        return Decoded(arrays, pixels)

    def _limits(self, header: ImageHeader, scaled: Sequence[Scaled]) -> ProcessLimits:
        pixels = header.width * header.height
        results = sum(one.width * one.height for one in scaled)
        memory = _MEMORY + _MEMORY_PER_PIXEL[header.format] * max(pixels, _USUAL_PIXELS) + 16 * results
        cpu_s = _CPU_S + _CPU_S_PER_PIXEL * (pixels + results)
        output = _OUTPUT + sum(prod(_shape(box)) for one in scaled for box in one.boxes)
        return ProcessLimits(cpu_s, cpu_s * _WALL_PER_CPU_S, max(memory, self._memory), output)


def _shape(box: Box) -> tuple[int, int, int]:
    return box.bottom - box.top, box.right - box.left, 3
