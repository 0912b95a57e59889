"""The rows of images in a prompt: their numbers in the cache, their embeddings, and their positions.

In the tokens of a prompt, IMAGE_ROW stands for each row. In slots and saved states, a row has a negative number
instead, which is a hash of the image's key and the row's index, so that a prefix never matches another image. The first
row of a tile has an even number, and all other rows have odd ones, so that `slots.whole_images` finds the border before
an image without knowing the prompt.
"""

from __future__ import annotations

import hashlib
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec import Struct, structs

from llmrun.base.errors import UsageError
from llmrun.base.types import IMAGE_ROW, Batch
from llmrun.engine.requests import SeenImage
from llmrun.model.vision.layout import ImageLayout, Rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.model.vision.layout import Projector


class PromptImage(Struct, frozen=True):
    """An image of a prompt.

    name  for error messages, such as "image 2"
    data  the file
    key   identifies the file, its layout, the projector, and the version of the decoder
    seen  how the model sees the image
    """

    name: str
    data: bytes
    layout: ImageLayout
    key: bytes
    seen: SeenImage

    @classmethod
    def of(cls, name: str, data: bytes, detail: str, projector: Projector) -> PromptImage:
        """Read the header of a file and choose its layout. Raises UsageError."""
        from llmrun.formats.images.decoding import decoder_version
        from llmrun.formats.images.header import read_header

        header = read_header(data, name)
        try:
            layout = projector.layout(header.width, header.height, detail)
        except UsageError as error:
            raise UsageError(f"{name}: {error}", hint=error.hint) from None
        hashed = hashlib.sha256(hashlib.sha256(data).digest())
        hashed.update(msgspec.json.encode([layout, projector.identity, decoder_version()]))
        size = layout.width, layout.height
        seen = SeenImage(header.width, header.height, *size, layout.rows, header.animated)
        return cls(name, data, layout, hashed.digest(), seen)

    @property
    def tiles(self) -> list[Rows]:
        """The tiles in the order of the prompt."""
        return [piece for piece in self.layout.pieces if isinstance(piece, Rows)]


class PlacedTile(Struct, frozen=True):
    """A tile of an image in a prompt.

    image       the index of the image
    first       the index of the tile's first row among the rows of the image
    start, end  the positions of the rows in the prompt
    advance     how far the RoPE positions advance, for models with M-RoPE
    """

    image: int
    first: int
    start: int
    end: int
    nx: int
    advance: int


class PromptImages:
    """The images of one request.

    rows  the embeddings that the next steps need, by the index of the image
    """

    def __init__(self, tokens: Sequence[int], images: Sequence[PromptImage], projector: Projector) -> None:
        """Find the places of the images, which are in the order of the prompt. Raises UsageError."""
        self.images = images
        self.rows: dict[int, NDArray[np.float32]] = {}
        self._projector = projector
        self.is_causal = projector.is_causal
        self._tiles: list[PlacedTile] = []
        places: list[int] = np.flatnonzero(np.array(tokens) == IMAGE_ROW).tolist()
        n = 0
        for index, image in enumerate(images):
            first = 0
            for tile in image.tiles:
                own = places[n : n + tile.count]
                n += tile.count
                if len(own) != tile.count or own[-1] - own[0] != tile.count - 1:
                    raise UsageError(f"{image.name} has another size than the image of the recorded prompt")
                advance = max(tile.nx, tile.ny)
                self._tiles.append(PlacedTile(index, first, own[0], own[-1] + 1, tile.nx, advance))
                first += tile.count
        if n < len(places):
            raise UsageError("the recorded prompt has more images than the request")
        self._ends = [tile.end for tile in self._tiles]

    def moved(self, tokens: Sequence[int]) -> PromptImages:
        """Return the same images in other tokens, such as recorded ones. Raises UsageError if they do not fit."""
        return PromptImages(tokens, self.images, self._projector)

    @property
    def row_counts(self) -> list[int]:
        """The number of rows of each image."""
        return [image.layout.rows for image in self.images]

    @property
    def fewest_rows(self) -> int:
        """The number of rows of the smallest image."""
        return self._projector.layout(1, 1).rows

    def _from(self, position: int) -> list[PlacedTile]:
        """Return the tiles that end after a position."""
        return self._tiles[bisect_right(self._ends, position) :]

    def step_end(self, depth: int, end: int) -> int:
        """Return where a step that begins at position `depth` should end, given that it should end at `end`.

        A step has only rows whose embeddings are known, and the caller has checked the first row with `lacks_row`. A
        tile that is not causal is never divided, even if the step becomes longer.
        """
        for tile in self._from(depth):
            if tile.start >= end:
                break
            if tile.image not in self.rows:
                return tile.start
            if not self.is_causal and tile.end > end:
                return tile.start if tile.start > depth else tile.end
        return end

    def lacks_row(self, position: int) -> bool:
        """Return whether the row at a position belongs to an image whose embeddings are unknown."""
        return (image := self.at(position)) is not None and image not in self.rows

    def missing(self, depth: int, end: int = sys.maxsize) -> list[int]:
        """Return the indexes of the images between two positions whose embeddings are unknown, in order."""
        found = dict.fromkeys(tile.image for tile in self._from(depth) if tile.start < end)
        return [index for index in found if index not in self.rows]

    def release(self, depth: int) -> None:
        """Forget the embeddings of images that end at or before a position."""
        if self.rows:
            left = {tile.image for tile in self._from(depth)}
            self.rows = {index: rows for index, rows in self.rows.items() if index in left}

    def forget_files(self) -> None:
        """Forget the embeddings and files of all images."""
        self.rows = {}
        self.images = [structs.replace(image, data=b"") for image in self.images]

    def at(self, position: int) -> int | None:
        """Return the index of the image with a row at this position, or None."""
        tile = next(iter(self._from(position)), None)
        return None if tile is None or tile.start > position else tile.image

    def marked(self, tokens: Sequence[int], first: int) -> list[int]:
        """Return the numbers under which tokens from position `first` on are cached."""
        found = list(tokens)
        for tile in self._from(first):
            start, end = max(tile.start, first), min(tile.end, first + len(found))
            if start >= end:
                break
            found[start - first : end - first] = self._numbers(tile)[start - tile.start : end - tile.start]
        return found

    def _numbers(self, tile: PlacedTile) -> list[int]:
        """Return the numbers of a tile's rows, each of which has 61 bits of a hash."""
        n = tile.end - tile.start
        seed = self.images[tile.image].key + tile.first.to_bytes(4)
        hashes = np.frombuffer(hashlib.shake_256(seed).digest(8 * n), "<u8") >> np.uint64(3)
        numbers = -2 * (hashes.astype(np.int64) + 1)
        numbers[1:] += 1
        found: list[int] = numbers.tolist()
        return found

    def embeddings(self, start: int, end: int) -> list[NDArray[np.float32]]:
        """Return the embeddings of the image rows between two positions, as arrays to concatenate."""
        found = []
        for tile in self._from(start):
            if tile.start >= end:
                break
            first = tile.first - tile.start
            found.append(self.rows[tile.image][first + max(tile.start, start) : first + min(tile.end, end)])
        return found

    def ahead(self, start: int, end: int) -> NDArray[np.int32]:
        """Return how many following rows each row between two positions attends to. Each tile is in one step."""
        found = np.zeros(end - start, np.int32)
        for tile in self._from(start):
            if tile.start >= end:
                break
            found[tile.start - start : tile.end - start] = np.arange(tile.end - tile.start)[::-1]
        return found

    def moves(self, end: int) -> bool:
        """Return whether a row before a position has RoPE positions that differ from its position."""
        return self._projector.uses_mrope and any(tile.start < end for tile in self._tiles[:1])

    def rope_positions(self, start: int, end: int) -> NDArray[np.int32]:
        """Return the RoPE positions in time, height and width of the rows between two positions, int32[rows, 3].

        An image at position p has the time p, and its rows and columns are counted from p. The text after the image
        continues at the first position beyond the image.
        """
        prompt = self._prompt_positions
        known = prompt[start:end]
        after = np.arange(max(start, len(prompt)), end, dtype=np.int32) + self._offset
        return np.concatenate([known, np.repeat(after[:, None], 3, 1)])

    @cached_property
    def _offset(self) -> int:
        """The difference between RoPE position and position after the last image."""
        return sum(tile.advance - (tile.end - tile.start) for tile in self._tiles)

    @cached_property
    def _prompt_positions(self) -> NDArray[np.int32]:
        """The RoPE positions up to the end of the last image."""
        found = np.repeat(np.arange(self._ends[-1], dtype=np.int32)[:, None], 3, 1)
        offset = 0
        for tile in self._tiles:
            at = tile.start + offset
            row, column = np.divmod(np.arange(tile.end - tile.start), tile.nx)
            found[tile.start : tile.end] = np.stack([np.full_like(row, at), at + row, at + column], 1)
            offset += tile.advance - (tile.end - tile.start)
            found[tile.end :] = np.arange(tile.end, len(found))[:, None] + offset
        return found


def with_images(batch: Batch, parts: Sequence[tuple[PromptImages | None, int, int]]) -> Batch:
    """Return the batch of a step with the rows of its images.

    parts  the images, the first position and the end of each part of the step
    """
    seen = [(images, start, end) for images, start, end in parts if images is not None]
    embeds = [rows for images, start, end in seen for rows in images.embeddings(start, end)]
    rope_pos = ahead = None
    if any(images.moves(end) for images, _, end in seen):
        rope_pos = np.repeat(batch.pos[:, None], 3, 1)
    if embeds and any(not images.is_causal for images, _, _ in seen):
        ahead = np.zeros(len(batch.pos), np.int32)
    first = 0
    for images, start, end in parts:
        own = slice(first, first + end - start)
        first = own.stop
        if images is not None and rope_pos is not None:
            rope_pos[own] = images.rope_positions(start, end)
        if images is not None and ahead is not None:
            ahead[own] = images.ahead(start, end)
    return replace(batch, embeds=np.concatenate(embeds) if embeds else None, rope_pos=rope_pos, ahead=ahead)
