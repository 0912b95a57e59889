"""How an image stands in a prompt: rows of embeddings, and the text around and between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from llmrun.formats.images.scaling import Scaled


PHOTO: Final = (1024, 768)  # the size of the sample photo of `show` and `fit`, in pixels


class Words(Struct, frozen=True):
    """Text of the prompt. Control strings in it become control tokens."""

    text: str


class Rows(Struct, frozen=True):
    """The embeddings of one tile, in the order in which the encoder returns them.

    tile     the number of the tile, counted over all boxes of the layout
    count    the number of rows, each of which takes the place of one token
    nx, ny   the grid of the rows for positions in two dimensions (M-RoPE); the rows are in raster order
    """

    tile: int
    count: int
    nx: int
    ny: int


class ImageLayout(Struct, frozen=True):
    """How a model sees an image, which follows from the image's size.

    pieces  in the order of the prompt; they replace the placeholder that the chat template wrote
    scaled  the sizes and boxes that the encoder needs
    width, height  the size in which the model sees the whole image, which shows whether details are lost
    """

    pieces: tuple[Words | Rows, ...]
    scaled: tuple[Scaled, ...]
    width: int
    height: int

    @property
    def rows(self) -> int:
        """The number of rows of all tiles."""
        return sum(piece.count for piece in self.pieces if isinstance(piece, Rows))


class Projector(Protocol):
    """A projector, which contains the vision encoder.

    family        the name in the key `clip.projector_type`, such as "gemma3"
    row_width     numbers per row: the width of the text model's embeddings, times 1 + the number of deepstack layers
    placeholders  the texts that chat templates write for an image; the pieces of its layout replace the whole text
    is_causal     False if the rows of an image attend to each other in both directions, so that a batch has all of them
    uses_mrope    True if the text model has M-RoPE, so that rows have positions in two dimensions
    most_rows     the most rows of one tile
    identity      a digest of the file, and of all that decides the rows of given pixels
    weight_bytes  the memory that the encoder's weights need
    memory_bytes  the memory that the weights and the activations need, for images of the usual detail
    """

    @property
    def family(self) -> str: ...

    @property
    def row_width(self) -> int: ...

    @property
    def placeholders(self) -> tuple[str, ...]: ...

    @property
    def is_causal(self) -> bool: ...

    @property
    def uses_mrope(self) -> bool: ...

    @property
    def most_rows(self) -> int: ...

    @property
    def identity(self) -> str: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def memory_bytes(self) -> int: ...

    def layout(self, width: int, height: int, detail: str = "auto") -> ImageLayout:
        """Return the layout of an image of this size in pixels, after its orientation was applied.

        detail  "auto", "low" for the fewest tokens that the settings allow, or "high" for the most
        Raises UsageError if the image is too large for the model.
        """
