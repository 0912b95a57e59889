"""The ops that look up the embeddings of tokens or positions, and place the rows of images between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmrun.model.plan.builder import PlanBuilder
from llmrun.model.plan.matrix import Matrix
from llmrun.model.plan.ops.base import Op
from llmrun.model.plan.twin import Value

if TYPE_CHECKING:
    from llmrun.model.plan.twin import Run


@dataclass(frozen=True, slots=True)
class Embed(Op):
    """An op that looks up the embedding of each token in the step: out = scale * table[token].

    If `by_position`, it looks up the embedding of each row's position instead.
    """

    table: Matrix
    scale: float
    by_position: bool
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return ()

    @property
    def matrix(self) -> Matrix:
        return self.table

    def twin(self, run: Run) -> None:
        positions = np.arange(len(run.tokens)) if self.by_position else None
        run.values[self.out] = run.rows_of(self.table, positions) * np.float32(self.scale)


class EmbedWords(NamedTuple):
    """The op record of `embed`. `scale` is a float32.

    `indices` is the offset in the step record of the list of indices, STEP_TOKENS or STEP_POSITIONS.
    """

    table: int
    group_bytes: int
    width: int
    out: int
    out_stride: int
    scale: int
    indices: int


class ImageOp(Op):
    """An op on the rows of images, which steps without images leave out."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class PlaceImages(ImageOp):
    """An op that replaces the rows of images: out = scale * the first part of the image's row."""

    scale: float
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.out,)

    @property
    def changes(self) -> Value:
        return self.out

    def twin(self, run: Run) -> None:
        if run.images is not None:
            placed = run.values[self.out].copy()
            placed[run.image_rows] = np.float32(self.scale) * run.images.embeds[:, : self.out.width]
            run.values[self.out] = placed


@dataclass(frozen=True, slots=True)
class AddImages(ImageOp):
    """An op that adds a part of the image's row to each row of an image. Part 0 is what PlaceImages places."""

    part: int
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.out,)

    @property
    def changes(self) -> Value:
        return self.out

    def twin(self, run: Run) -> None:
        if run.images is not None:
            total, first = run.values[self.out].copy(), self.part * self.out.width
            total[run.image_rows] += run.images.embeds[:, first : first + self.out.width]
            run.values[self.out] = total


class ImageWords(NamedTuple):
    """The op record of `place_images` and `add_images`. `scale` is a float32, which only `place_images` uses.

    first  byte offset of the part in a row of an image
    """

    out: int
    out_stride: int
    width: int
    first: int
    scale: int


class EmbeddingOps(PlanBuilder):
    __slots__ = ()

    def place_images(self, x: Value, scale: float = 1.0) -> None:
        """Append the op that replaces the rows of images in the embeddings x by the images' rows, times `scale`."""
        self.ops.append(PlaceImages(scale, x))

    def add_images(self, x: Value, part: int) -> None:
        """Append the op that adds part `part` of the images' rows to x. Each part is as wide as x."""
        self.ops.append(AddImages(part, x))

    def embed(self, table: Matrix, scale: float = 1.0) -> Value:
        out = Value(table.columns)
        self.ops.append(Embed(table, scale, by_position=False, out=out))
        return out

    def embed_positions(self, table: Matrix) -> Value:
        """Append the op that looks up each row's position, which must be less than the number of rows of the table."""
        out = Value(table.columns)
        self.ops.append(Embed(table, 1.0, by_position=True, out=out))
        return out
