"""The base class of all families of vision encoders: sizes, limits, and pieces of layouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from msgspec import Struct

from llmrun.base.errors import UsageError
from llmrun.formats.images.scaling import Box, Filter, Scaled
from llmrun.model.vision.layout import ImageLayout, Rows, Words

if TYPE_CHECKING:
    from collections.abc import Iterable

LOW, HIGH = "low", "high"

# Keys of the file, of which each family uses one
SCALE_FACTOR, MERGE_SIZE = "clip.vision.projector.scale_factor", "clip.vision.spatial_merge_size"


class Sizes(Struct, frozen=True):
    """The numbers of a projector's file that determine layouts.

    image_size    the side of a square image or tile, in pixels
    patch_size    the side of a patch, in pixels
    merge         patches per row of embeddings, in each direction
    longest_edge  the longer side of an image before it is cut into tiles, or 0 if the file does not specify it
    least_tiles, most_tiles  without the overview, or 0 if the file does not specify them
    """

    image_size: int
    patch_size: int
    merge: int
    longest_edge: int = 0
    least_tiles: int = 0
    most_tiles: int = 0

    @property
    def unit(self) -> int:
        """The side of the square that becomes one row, in pixels."""
        return self.patch_size * self.merge

    @property
    def side(self) -> int:
        """The number of rows in each direction of an image or tile of the fixed size."""
        return self.image_size // self.patch_size // self.merge


class Limits(Struct, frozen=True):
    """How many tokens the user wants images to have; None for the family's values."""

    least: int | None = None
    most: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("image_min_tokens", self.least), ("image_max_tokens", self.most)):
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}")
        if self.least is not None and self.most is not None and self.least > self.most:
            raise UsageError(f"image_min_tokens is {self.least:,}, but image_max_tokens is only {self.most:,}")

    def check_reachable(self, fewest: int, most: int | None = None) -> None:
        """Raise UsageError if no image of the family has a number of tokens within the limits."""
        if self.most is not None and self.most < fewest:
            raise UsageError(
                f"image_max_tokens is {self.most:,}, but images need {fewest:,} tokens with this projector",
                hint=f"use --image-max-tokens {fewest} or more",
            )
        if most is not None and self.least is not None and self.least > most:
            raise UsageError(
                f"image_min_tokens is {self.least:,}, but images have at most {most:,} tokens with this projector",
                hint=f"use --image-min-tokens {most} or fewer",
            )


class Family(ABC):
    """The encoders with one way to prepare images. Subclasses are in whole.py and tiled.py.

    names         the values of `clip.projector_type`
    placeholders  the texts that chat templates write for an image
    markers       the control tokens in the text around the rows
    is_causal     False if the rows of an image attend to each other in both directions
    uses_mrope    True if the rows have positions in two dimensions
    merge_key     the key with `Sizes.merge`, whose default is `usual_merge`
    """

    names: ClassVar[tuple[str, ...]]
    placeholders: ClassVar[tuple[str, ...]]
    markers: ClassVar[tuple[str, ...]]
    is_causal: ClassVar[bool] = True
    uses_mrope: ClassVar[bool] = False
    merge_key: ClassVar[str]
    usual_merge: ClassVar[int]

    def __init__(self, sizes: Sizes, limits: Limits) -> None:
        """Raise UsageError if the limits cannot be met."""
        self.sizes = sizes
        self.limits = limits

    @classmethod
    def fault(cls, sizes: Sizes) -> str:
        """Return what is wrong with the sizes of a file, or ""."""
        return ""

    @property
    @abstractmethod
    def most_rows(self) -> int:
        """The most rows of one tile."""

    @abstractmethod
    def layout(self, width: int, height: int, detail: str) -> ImageLayout:
        """Return the layout of an image of this size. Raises UsageError if the model cannot read such an image."""


def fault_of_square(sizes: Sizes) -> str:
    """Return why an image or tile of the fixed size cannot be divided into rows, or ""."""
    patches = sizes.image_size // sizes.patch_size
    if patches and not patches % sizes.merge:
        return ""
    return f"{patches} patches cannot be divided into groups of {sizes.merge}"


def whole_image(
    size: tuple[int, int], filter_: Filter, start: str, grid: tuple[int, int], end: str, *, extra: int = 0
) -> ImageLayout:
    """Return the layout of an image that is one tile.

    size   width and height to which the image is stretched
    grid   columns and rows of embeddings
    extra  embeddings that are not part of the grid, such as line breaks
    """
    rows = Rows(0, grid[0] * grid[1] + extra, *grid)
    return ImageLayout(joined((start, rows, end)), (stretched(*size, filter_),), *size)


def stretched(width: int, height: int, filter_: Filter, *, source: int = -1) -> Scaled:
    """Return an image stretched to a size, which is one tile."""
    return Scaled(width, height, filter_, (Box(0, 0, width, height),), source)


def cut(columns: int, rows: int, tile: int, filter_: Filter, *, source: int = -1) -> Scaled:
    """Return an image stretched to a grid of square tiles, which are numbered row by row."""
    boxes = tuple(
        Box(column * tile, row * tile, (column + 1) * tile, (row + 1) * tile)
        for row in range(rows)
        for column in range(columns)
    )
    return Scaled(columns * tile, rows * tile, filter_, boxes, source)


def joined(parts: Iterable[str | Rows]) -> tuple[Words | Rows, ...]:
    """Return the pieces of a layout. Adjacent texts become one, because tokens may span them."""
    pieces: list[Words | Rows] = []
    for part in parts:
        if isinstance(part, Rows):
            pieces.append(part)
        elif part and pieces and isinstance(pieces[-1], Words):
            pieces[-1] = Words(pieces[-1].text + part)
        elif part:
            pieces.append(Words(part))
    return tuple(pieces)
