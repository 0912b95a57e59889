"""A stand-in for the encoder of a model that reads images, so that tests need neither a model nor a projector.

The number of rows follows from the size of an image, and a row holds the mean colour of its patch. `echo` therefore
answers with what the model saw: "[6 rows of #ff0000]" stands for an image with red in the upper left corner.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from msgspec import Struct

from llmrun.base.errors import Cancelled, LlmrunError, UsageError
from llmrun.base.types import IMAGE_ROW
from llmrun.formats.images.scaling import Box, Filter, Scaled
from llmrun.model.vision.layout import ImageLayout, Rows, Words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.base.types import Batch

PLACEHOLDER: Final = "<|image|>"
BEGIN_IMAGE: Final = "<|image_begin|>"
END_IMAGE: Final = "<|image_end|>"
IMAGE_TOKENS: Final = (PLACEHOLDER, BEGIN_IMAGE, END_IMAGE)
PATCH: Final = 32  # pixels of a patch's side
ROW_WIDTH: Final = 8
# A chat template that writes a placeholder for each image.
TEMPLATE: Final = (
    """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{ '"""
    + PLACEHOLDER
    + """' }}{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
)
# Voices see a row as one of these characters, whose lower 16 bits are the colour of the patch: 5 bits of red, 6 of
# green and 5 of blue.
_FIRST_ROW: Final = 0x100000
_ROWS: Final = re.compile(f"[\u0104-\u0fff]?([{chr(_FIRST_ROW)}-{chr(0x10FFFF)}]+)[\u0104-\u0fff]?")  # with markers
_COLOR_BITS: Final = 22  # the higher bits of a cached row depend on everything else in it


class ScriptedProjector(Struct, frozen=True):
    """The projector of a scripted model. A file can set the fields that follow `identity`.

    columns, lines  the most patches of an image in each direction; larger images are shrunk
    uses_mrope  True if rows have positions in two dimensions
    has_overview  True if an image has a second tile, which is a single patch with the whole image
    end      the text after an image, which may be empty
    encode_seconds  how long encoding an image takes
    encode_looks  how often the engine finds an image unfinished before it is encoded
    encode_tiles  how many tiles of rows an image has for an encoder in the engine's thread, or 0 for an encoder with a
             process of its own
    tile_seconds  how long encoding such a tile takes
    expected_seconds  the forecast for an image, or 0 for none
    error    a message with which every encoding fails
    weight_bytes, memory_bytes  as in Projector
    """

    family: str = "scripted"
    row_width: int = ROW_WIDTH
    placeholders: tuple[str, ...] = (PLACEHOLDER,)
    columns: int = 16
    lines: int = 16
    is_causal: bool = True
    uses_mrope: bool = False
    has_overview: bool = False
    end: str = END_IMAGE
    encode_seconds: float = 0.0
    encode_looks: int = 0
    encode_tiles: int = 0
    tile_seconds: float = 0.0
    expected_seconds: float = 0.0
    error: str = ""
    weight_bytes: int = 0
    memory_bytes: int = 0

    @property
    def most_rows(self) -> int:
        return self.columns * self.lines

    @property
    def identity(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

    def layout(self, width: int, height: int, detail: str = "auto") -> ImageLayout:
        """Return a layout with one row for each patch, or a single row if `detail` is "low"."""
        nx = 1 if detail == "low" else min(-(-width // PATCH), self.columns)
        ny = 1 if detail == "low" else min(-(-height // PATCH), self.lines)
        pieces: list[Words | Rows] = [Words(BEGIN_IMAGE), Rows(0, nx * ny, nx, ny)]
        scaled = [_whole(nx * PATCH, ny * PATCH)]
        if self.has_overview:
            pieces += [Words("overview"), Rows(1, 1, 1, 1)]
            scaled.append(_whole(PATCH, PATCH))
        end = (Words(self.end),) if self.end else ()
        return ImageLayout((*pieces, *end), tuple(scaled), nx * PATCH, ny * PATCH)


def _whole(width: int, height: int) -> Scaled:
    return Scaled(width, height, Filter.BILINEAR, (Box(0, 0, width, height),))


class ScriptedVision:
    """The encoder of a scripted model, with lists for inspection by tests.

    begun    every encoding that was begun
    encoded  the layout of every image that was encoded
    """

    def __init__(self, projector: ScriptedProjector) -> None:
        self.projector = projector
        self.begun: list[ScriptedEncoding] = []
        self.encoded: list[ImageLayout] = []

    @property
    def runs_apart(self) -> bool:
        return not self.projector.encode_tiles

    def expected_seconds(self, layout: ImageLayout) -> float | None:
        return self.projector.expected_seconds or None

    def close(self) -> None:
        """Do nothing, because there is no process."""

    def begin(self, tiles: Sequence[NDArray[np.uint8]], layout: ImageLayout) -> ScriptedEncoding:
        boxes = [box for scaled in layout.scaled for box in scaled.boxes]
        sizes = [(box.bottom - box.top, box.right - box.left, 3) for box in boxes]
        if [tile.shape for tile in tiles] != sizes:
            raise AssertionError(f"the tiles are {[tile.shape for tile in tiles]}, not {sizes}")
        if self.begun and not self.begun[-1].has_ended:
            raise AssertionError("an image is being encoded")
        self.begun.append(ScriptedEncoding(self, tiles, layout))
        return self.begun[-1]


class ScriptedEncoding:
    """An image that a scripted encoder encodes.

    waited         how many seconds the engine was ready to wait for the image in all
    n_tiles        how many tiles of rows are encoded
    is_cancelled   True after `cancel`
    has_ended      True after the rows or an error
    """

    def __init__(self, vision: ScriptedVision, tiles: Sequence[NDArray[np.uint8]], layout: ImageLayout) -> None:
        self._vision, self._tiles, self._layout = vision, tiles, layout
        self._looks, self._end = vision.projector.encode_looks, time.monotonic() + vision.projector.encode_seconds
        self.waited, self.n_tiles = 0.0, 0
        self.is_cancelled = self.has_ended = False

    @property
    def progress(self) -> float:
        return self.n_tiles / max(self._vision.projector.encode_tiles, 1)

    def advance(self, seconds: float) -> NDArray[np.float32] | None:
        self.waited += seconds
        if self.is_cancelled:
            self.has_ended = True
            raise Cancelled("stopped in the middle of an image")
        self.has_ended = self._encodes_tile() if self._vision.projector.encode_tiles else self._waits(seconds)
        if not self.has_ended:
            return None
        if error := self._vision.projector.error:
            raise LlmrunError(error)
        self._vision.encoded.append(self._layout)
        pieces = [piece for piece in self._layout.pieces if isinstance(piece, Rows)]
        return np.concatenate([_rows_of(self._tiles[piece.tile], piece) for piece in pieces])

    def _encodes_tile(self) -> bool:
        """Encode a tile, and return whether it was the last one."""
        time.sleep(self._vision.projector.tile_seconds)
        self.n_tiles += 1
        return self.n_tiles == self._vision.projector.encode_tiles

    def _waits(self, seconds: float) -> bool:
        """Wait for the end of the encoding, and return whether it has come."""
        if self._looks > 0 or time.monotonic() + seconds < self._end:
            self._looks -= 1
            time.sleep(seconds)
            return False
        time.sleep(max(self._end - time.monotonic(), 0.0))
        return True

    def cancel(self) -> None:
        self.is_cancelled = True


def _rows_of(tile: NDArray[np.uint8], piece: Rows) -> NDArray[np.float32]:
    """Return the mean colours of the patches of a tile, and a hash of the tile."""
    patches = tile.reshape(piece.ny, PATCH, piece.nx, PATCH, 3).mean((1, 3)).reshape(-1, 3)
    digest = np.frombuffer(hashlib.blake2b(tile.tobytes(), digest_size=ROW_WIDTH - 3).digest(), np.uint8)
    return np.concatenate([patches, np.tile(digest, (len(patches), 1))], 1, dtype=np.float32)


def open_vision(path: Path, most: int | None) -> ScriptedVision:
    """Return the default encoder or, for a .json file, the encoder that the file describes. Raises UsageError.

    most  the most rows of an image
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else {}
        projector = msgspec.convert(fields, ScriptedProjector)
    except (OSError, ValueError) as error:
        raise UsageError(f"invalid script for the scripted projector: {path}: {error}") from error
    if most is not None:
        side = max(int(most**0.5), 1)
        projector = msgspec.structs.replace(projector, columns=side, lines=side)
    return ScriptedVision(projector)


def cached_rows(batch: Batch) -> dict[int, int]:
    """Return the numbers under which the cache stores the image rows of a batch, by the index of the row."""
    if batch.embeds is None:
        return {}
    numbers = {}
    for index, row in zip(np.flatnonzero(batch.tokens == IMAGE_ROW).tolist(), batch.embeds, strict=True):
        red, green, blue = (int(value) for value in row[:3])
        character = _FIRST_ROW | red >> 3 << 11 | green >> 2 << 5 | blue >> 3
        numbers[index] = character | hashlib.blake2b(row.tobytes(), digest_size=1).digest()[0] << _COLOR_BITS
    return numbers


def describe_rows(text: str) -> str:
    """Replace the rows of images and their markers by a description, such as "[6 rows of #ff0000]"."""

    def described(found: re.Match[str]) -> str:
        color, n = ord(found[1][0]), len(found[1])
        red, green, blue = color >> 11 & 31, color >> 5 & 63, color & 31
        rows = "1 row" if n == 1 else f"{n} rows"
        return f"[{rows} of #{red * 255 // 31:02x}{green * 255 // 63:02x}{blue * 255 // 31:02x}]"

    return _ROWS.sub(described, text)


def breach_of_images(batch: Batch, projector: ScriptedProjector | None) -> str:
    """Return which rule of the seam the image rows of a batch break, or an empty string."""
    images = batch.tokens == IMAGE_ROW
    n = int(images.sum())
    if not n:
        return "" if batch.embeds is None and batch.ahead is None else "a batch without images has embeddings"
    if projector is None:
        return "a model without a projector got an image"
    embeds = batch.embeds
    if embeds is None or embeds.dtype != np.float32 or embeds.shape != (n, projector.row_width):
        return f"{n} rows of images need embeddings of the same number"
    if projector.uses_mrope and (batch.rope_pos is None or batch.rope_pos.shape != (len(images), 3)):
        return "rope_pos is missing"
    if (batch.ahead is None) != projector.is_causal:
        return "ahead must be given exactly for images that are not causal"
    if batch.ahead is not None:
        ahead: list[int] = batch.ahead.tolist()
        for index, (n_ahead, is_image) in enumerate(zip(ahead, images.tolist(), strict=True)):
            if (n_ahead and not is_image) or ahead[index : index + n_ahead + 1] != [*range(n_ahead, -1, -1)]:
                return f"row {index} looks {n_ahead} rows ahead"
    return ""
