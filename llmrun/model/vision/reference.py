"""Encodes images with the NumPy twins of an encoder's ops, which define the correct results of the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.model.plan.reference import multiply_exact, multiply_quantizing
from llmrun.model.plan.twin import ImageInputs, Run
from llmrun.model.vision.encoder import Geometry, VisionEncoder, encoding

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from llmrun.model.plan.builder import Stage
    from llmrun.model.plan.shapes import Reach
    from llmrun.model.plan.twin import Multiply


class _StageRun(Run):
    """A run of an encoder's stages, each of them for all rows at a time."""

    def __init__(self, encoder: VisionEncoder, geometry: Geometry, multiply: Multiply, kv_type: str | None) -> None:
        images = None
        if geometry.positions is not None:
            images = ImageInputs(np.empty((0, 0), np.float32), geometry.positions)
        tokens = np.zeros(geometry.rows, np.int32)
        super().__init__(encoder.plan.ropes, tokens, multiply, kv_type, images=images)
        self._geometry = geometry

    def seen_from(self, position: int, reach: Reach) -> slice:
        return slice(*self._geometry.seen_in(reach)[position].tolist())


def encode_exactly(
    encoder: VisionEncoder, image: NDArray[np.uint8], stages: dict[str, NDArray[np.float32]] | None = None
) -> NDArray[np.float32]:
    """Encode a tile of an image, uint8[height, width, 3], without quantizing activations, keys and values.

    stages  receives the output of each stage, by its name

    Returns float32[embeddings, row width].
    """
    return _encode(encoder, image, multiply_exact, None, stages)


def encode_quantizing(
    encoder: VisionEncoder, image: NDArray[np.uint8], kv_type: str, stages: dict[str, NDArray[np.float32]] | None = None
) -> NDArray[np.float32]:
    """Encode in the same way as `encode_exactly`, but round in the same places as the kernels."""
    return _encode(encoder, image, multiply_quantizing, kv_type, stages)


def _encode(
    encoder: VisionEncoder,
    image: NDArray[np.uint8],
    multiply: Multiply,
    kv_type: str | None,
    stages: dict[str, NDArray[np.float32]] | None,
) -> NDArray[np.float32]:
    runs: list[_StageRun] = []

    def run(stage: Stage, rows: NDArray[np.float32], tile: slice, geometry: Geometry) -> NDArray[np.float32]:
        if not runs:
            runs.append(_StageRun(encoder, geometry, multiply, kv_type))
        values = runs[0].values
        values[stage.takes] = rows
        for op in encoder.plan.ops[stage.first : stage.end]:
            op.twin(runs[0])
        made = values[stage.takes if stage.gives is None else stage.gives]
        if stages is not None:
            stages[stage.name] = made
        return made

    return finished(encoding(encoder, image, run, tile_rows=1 << 30))


def finished(steps: Generator[None, None, NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return the result of `encoding`."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            rows: NDArray[np.float32] = end.value
            return rows
