"""The base class of all encoders of images, the geometry of an image's patches, and the loop over the stages.

An encoder turns the patches of an image into rows of features, runs them through the layers of a transformer, and
merges the rows of neighbouring patches into the rows of embeddings that the text model reads. Its plan is divided into
stages (plan/builder.py), so that only two kinds of data cover all patches: the features `x`, and the keys and values of
one layer. Everything else exists only for a tile of rows. The files in encoders/ write the plans.

Pixels, positions and merges are computed here, in NumPy, with operations whose rounding IEEE 754 defines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from llmrun.model.plan.plan import Plan
from llmrun.model.plan.twin import Value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.builder import Stage
    from llmrun.model.plan.shapes import Reach
    from llmrun.model.vision.projector import ProjectorFile

TILE_ROWS = 256  # rows that a stage computes at a time


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where the rows of an encoder are in the image. Rows are in any order that suits the encoder.

    patches    intp[patches], the patch of each row, counted row by row from the top left corner of the image
    groups     intp[embeddings, k], the rows that become each row of embeddings
    added      returns what is added to the embedded patches of some rows, such as learned positions, as float32[rows,
               width]; or None. Positions of all rows would take as much memory as the features
    leading    the number of rows before those of the patches, such as a class token, which are only in `added`
    positions  int32[rows, 3], the positions that the axes of `Rope` select; or None without RoPE
    seen       int32[rows, 2], the first row that each row attends to, and the one after the last, for each reach in
               which rows do not attend to all others
    """

    patches: NDArray[np.intp]
    groups: NDArray[np.intp]
    added: Callable[[slice], NDArray[np.float32]] | None = None
    leading: int = 0
    positions: NDArray[np.int32] | None = None
    seen: Mapping[Reach, NDArray[np.int32]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """The number of rows in the layers."""
        return self.leading + len(self.patches)

    def seen_in(self, reach: Reach) -> NDArray[np.int32]:
        """Return int32[rows, 2], the first row that each row attends to, and the one after the last."""
        found = self.seen.get(reach)
        return np.broadcast_to(np.array([0, self.rows], np.int32), (self.rows, 2)) if found is None else found


class VisionEncoder(ABC):
    """The plan of an encoder, and how it divides images into rows. Subclasses are in encoders/.

    names    the values of `clip.projector_type`
    plan     its stages take patches, features or merged rows; those that take features give features
    patches  the value with the normalized pixels of patches: all of a channel's rows of pixels, channel by channel
    x        the features of all rows, which the layers change in place
    patch    the side of a patch, in pixels
    merge    patches per row of embeddings, in each direction
    """

    names: ClassVar[tuple[str, ...]]

    def __init__(self, file: GGUFFile, projector: ProjectorFile) -> None:
        """Write the plan. Raises BadGGUF and UnsupportedModel."""
        self.plan = Plan()
        self.projector = projector
        self.patch, self.merge = projector.layouts.sizes.patch_size, projector.layouts.sizes.merge
        self.patches = Value(3 * self.patch**2)
        self.x = Value(file.integer("clip.vision.embedding_length", minimum=1))
        mean, deviation = (
            np.array(file.numbers(f"clip.vision.image_{name}")[:3], np.float64)[:, None] for name in ("mean", "std")
        )
        self._normalized = ((np.arange(256) / 255 - mean) / deviation).astype(np.float32)  # float32[3, 256]

    @abstractmethod
    def geometry(self, columns: int, rows: int) -> Geometry:
        """Return the geometry of an image of so many columns and rows of patches."""

    def merged(self, x: NDArray[np.float32], groups: NDArray[np.intp]) -> NDArray[np.float32]:
        """Merge features float32[rows, width] into float32[groups, merged width]. The default concatenates groups."""
        return x[groups].reshape(len(groups), -1)

    def embeddings(self, made: NDArray[np.float32], columns: int, rows: int) -> NDArray[np.float32]:
        """Return the rows of embeddings, given what the stages made of merged rows, float32[groups, row width].

        columns, rows  the numbers of patches
        """
        return made

    def pixels_of(self, image: NDArray[np.uint8], geometry: Geometry) -> NDArray[np.uint8]:
        """Return the pixels of patches, uint8[patches, 3 * patch * patch], for an image, uint8[height, width, 3]."""
        side = self.patch
        rows, columns = image.shape[0] // side, image.shape[1] // side
        tiled = image[: rows * side, : columns * side].reshape(rows, side, columns, side, 3)
        return tiled.transpose(0, 2, 4, 1, 3).reshape(rows * columns, 3 * side**2)[geometry.patches]

    def normalized(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the numbers that the encoder reads for pixels of patches, in the same shape."""
        channels = pixels.reshape(len(pixels), 3, -1)
        return self._normalized[np.arange(3)[:, None], channels].reshape(pixels.shape)


# Runs a stage for the rows in a slice, given float32[rows, width of the input]. Returns float32[rows, output's width].
RunStage = Callable[["Stage", "NDArray[np.float32]", slice, Geometry], "NDArray[np.float32]"]


def rows_of_stage(encoder: VisionEncoder, stage: Stage, geometry: Geometry) -> int:
    """Return the number of rows that a stage computes."""
    if stage.takes is encoder.patches:
        return len(geometry.patches)
    return geometry.rows if stage.takes is encoder.x else len(geometry.groups)


def encoding(
    encoder: VisionEncoder, image: NDArray[np.uint8], run: RunStage, tile_rows: int = TILE_ROWS
) -> Generator[None, None, NDArray[np.float32]]:
    """Encode a tile of an image, uint8[height, width, 3]. Yields after each tile of rows.

    Returns float32[embeddings, row width].
    """
    columns, rows = image.shape[1] // encoder.patch, image.shape[0] // encoder.patch
    geometry = encoder.geometry(columns, rows)
    pixels = encoder.pixels_of(image, geometry)
    x = np.zeros((geometry.rows, encoder.x.width), np.float32)
    if geometry.added is not None and geometry.leading:
        x[: geometry.leading] = geometry.added(slice(geometry.leading))
    # The output of the last stage comes first, and then the outputs of those that merge features of earlier layers.
    embeddings = np.empty((len(geometry.groups), encoder.projector.row_width), np.float32)
    place = 0
    for stage in encoder.plan.stages:
        count = rows_of_stage(encoder, stage, geometry)
        if stage.takes is not encoder.patches and stage.takes is not encoder.x:
            assert stage.gives is not None
            place = (place + stage.gives.width) % encoder.projector.row_width
            part = embeddings[:, place : place + stage.gives.width]
        for first in range(0, count, tile_rows):
            tile = slice(first, min(first + tile_rows, count))
            if stage.takes is encoder.patches:
                to = slice(geometry.leading + tile.start, geometry.leading + tile.stop)
                x[to] = run(stage, encoder.normalized(pixels[tile]), tile, geometry)
                if geometry.added is not None:
                    x[to] += geometry.added(to)
            elif stage.takes is encoder.x:
                made = run(stage, x[tile], tile, geometry)
                if stage.gives is not None:
                    x[tile] = made
            else:
                part[tile] = run(stage, encoder.merged(x, geometry.groups[tile]), tile, geometry)
            yield
    return encoder.embeddings(embeddings, columns, rows)
