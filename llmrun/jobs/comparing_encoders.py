"""Compares the rows that both backends compute for a test picture: the CPU engine, and libmtmd of llama.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from llmrun.base.errors import ModelFileError, shown
from llmrun.formats.images.resampling import tiles
from llmrun.model.vision.layout import ImageLayout, Rows

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from llmrun.backends.base import Vision
    from llmrun.model.vision.projector import ProjectorFile

SIZE: Final = (640, 480)  # the width and height of the test picture
# The smallest cosine of rows that agree. The engines add up products in different orders, and round activations in
# different places if the weights are integers. Swapped axes, tiles or channels make cosines below 0.9.
_OF_FLOATS, _OF_INTEGERS = 0.999, 0.99
# In these families, llama.cpp differs from the model's own code, which llmrun follows (docs/images.md).
_KNOWN: Final = {
    "gemma4v": "llama.cpp uses a different activation function from Gemma 4's, unless the file names it",
    "internvl": "llama.cpp moves the positions of InternVL's patches by one, and approximates its activation function",
}


class RowsCompared(NamedTuple):
    """How the rows of the two engines compare.

    rows        the number of rows
    cosine      the smallest cosine of a row of one engine and the same row of the other
    difference  the largest norm of a difference, relative to the norm of llama.cpp's row
    tolerance   the smallest cosine of rows that agree
    known       why the engines are expected to differ, or ""
    """

    projector: Path
    rows: int
    cosine: float
    difference: float
    tolerance: float
    known: str

    @property
    def agrees(self) -> bool:
        return self.cosine >= self.tolerance


def compare_encoders(model: Path, projector: ProjectorFile, threads: int) -> RowsCompared:
    """Encode one tile of the test picture with both engines, one after the other.

    model  the file of the text model, whose vocabulary libmtmd reads
    Raises LlmrunError if an engine cannot load the projector or encode the picture.
    """
    from llmrun.backends.cpu.vision import CpuVision
    from llmrun.backends.llama.vision import LlamaVision

    layout = projector.layout(*SIZE, "low")
    of_picture = tiles(sample_picture(), layout.scaled)
    first = next(piece for piece in layout.pieces if isinstance(piece, Rows))
    one = ImageLayout((first,), layout.scaled, layout.width, layout.height)
    own = _encoded(CpuVision.loaded(projector, threads), of_picture, one)
    theirs = _encoded(LlamaVision(model, projector, threads), of_picture, one)
    if not (np.isfinite(own).all() and np.isfinite(theirs).all()):
        raise ModelFileError(
            f"the projector is damaged: {shown(str(projector.path), 300)}: a picture has rows with NaN or infinity",
            hint="download the projector again",
        )
    norms = np.linalg.norm(own, axis=1) * np.linalg.norm(theirs, axis=1)
    cosines = np.einsum("rc,rc->r", own, theirs) / np.maximum(norms, 1e-30)
    differences = np.linalg.norm(own - theirs, axis=1) / np.maximum(np.linalg.norm(theirs, axis=1), 1e-30)
    return RowsCompared(
        projector.path,
        len(own),
        float(cosines.min()),
        float(differences.max()),
        _tolerance(projector),
        _KNOWN.get(projector.family, ""),
    )


def sample_picture() -> NDArray[np.uint8]:
    """Return a picture without symmetry, uint8[height, width, 3]: gradients, a disc, bars, and a small letter F."""
    width, height = SIZE
    y, x = np.mgrid[:height, :width]
    picture = np.stack([x * 255 // width, y * 255 // height, (x + 2 * y) * 255 // (width + 2 * height)], -1)
    picture[(x - 180) ** 2 + (y - 150) ** 2 < 100**2] = (230, 40, 30)
    picture[(x > 400) & (x // 16 % 2 == 0) & (y > 300)] = (20, 20, 90)
    for left, top, right, bottom in ((420, 60, 440, 200), (420, 60, 520, 80), (420, 120, 490, 140)):
        picture[top:bottom, left:right] = 255
    return picture.astype(np.uint8)


def _encoded(vision: Vision, of_picture: list[NDArray[np.uint8]], layout: ImageLayout) -> NDArray[np.float64]:
    try:
        encoding = vision.begin(of_picture, layout)
        while (rows := encoding.advance(1.0)) is None:
            pass
        return rows.astype(np.float64)
    finally:
        vision.close()


def _tolerance(projector: ProjectorFile) -> float:
    from llmrun.formats.gguf.reader import open_gguf

    with open_gguf(projector.path) as file:
        is_integer = any(tensor.type.block_weights > 1 for tensor in file.tensors.values())
    return _OF_INTEGERS if is_integer else _OF_FLOATS
