"""Opens tiny models with their projectors in llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun.backends.base import OpenOptions
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.backends.llama.vision import LlamaVision
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.vision.layout import Rows
from tests.support.vision.projectors import tiny_projector, tiny_text_model
from tests.support.vision.prompts import Image, one_tile, tiles_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmrun.backends.base import Backend, Vision
    from llmrun.model.vision.layout import ImageLayout

SMALL: dict[str, dict[str, Any]] = {
    "gemma3": {"image_size": 112},
    "internvl": {"image_size": 112},
    "idefics3": {"image_size": 128, "keys": {"preproc_image_size": 512}},
}


def open_vision(folder: Path, name: str, **options: Any) -> LlamaBackend:
    """Open a tiny text model with its projector, which has a small fixed size if its family has one."""
    projector = tiny_projector(folder, name, **SMALL.get(name, {}))
    settings = OpenOptions(context_size=2048, threads=1, gpu_layers=0, mmproj=str(projector))
    with open_gguf(tiny_text_model(folder, name)) as file:
        return LlamaBackend(file, replace(settings, **options))


def vision_of(backend: Backend) -> LlamaVision:
    assert isinstance(backend.vision, LlamaVision)
    return backend.vision


def encode(vision: Vision, tiles: Sequence[NDArray[np.uint8]], layout: ImageLayout) -> NDArray[np.float32]:
    """Encode an image and wait for its rows."""
    encoding = vision.begin(tiles, layout)
    while (rows := encoding.advance(60)) is None:
        pass
    return rows


def encoded(backend: Backend, layout: ImageLayout, seed: int = 0) -> Image:
    """Return the first tile of a layout, encoded."""
    vision, first = backend.vision, one_tile(layout)
    assert vision is not None
    (piece,) = first.pieces
    assert isinstance(piece, Rows)
    return Image(piece, encode(vision, tiles_of(first, seed)[:1], first))
